"""Bringing axes together: unify, split and reshape expressions, refining their atoms where that is needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .expressions import ONE, ZERO, Atom, Cat, Expr, Fam, Prod, atoms, define, factors, families, freeze, fresh, is_fixed, norm


def collapse(fam: Fam) -> bool:
    """Couple the members of a family: the same units at every index of its key."""
    fine = True
    for part in fam.parts[1:]:
        fine &= unify(fam.parts[0], part)
    return fine


def closed(e: Expr) -> Expr:
    """The expression without families: those that remain are coupled."""
    for fam in families(e):
        collapse(fam)
    return norm(e)


def unify(a: Expr, b: Expr) -> bool:
    """The same units on both axes. Where their structures cannot be aligned both freeze, and the answer is False."""
    a, b = norm(a), norm(b)
    if a is b:
        return True
    if a.size != b.size:
        return _fail([a, b], f"axes of {a.size} and {b.size} units meet")
    if is_fixed(a) and is_fixed(b) and not (_is_key(a) and _is_key(b)):
        return True
    if isinstance(a, Fam) or isinstance(b, Fam):
        return _unify_family(a, b)
    if isinstance(a, Atom) or isinstance(b, Atom):
        a, b = (a, closed(b)) if isinstance(a, Atom) else (b, closed(a))
        a = norm(a)
        if a is b:
            return True
        if not isinstance(a, Atom):
            return unify(a, b)
        if a.key and not isinstance(b, Atom):
            return _fail([a, b], "numbers the parts of a fused axis")
        define(a, b)
        return True
    if isinstance(a, Cat) or isinstance(b, Cat):
        return _unify_cat(a, b)
    return _unify_prod(list(a.parts), list(b.parts))


def _is_key(e: Expr) -> bool:
    return isinstance(e, Atom) and e.key


def _unify_family(a: Expr, b: Expr) -> bool:
    if isinstance(a, Fam) and isinstance(b, Fam) and norm(a.key) is norm(b.key):
        answers = [unify(x, y) for x, y in zip(a.parts, b.parts)]  # every pair, also after one that failed
        return all(answers)
    for e in (a, b):
        if isinstance(e, Fam):
            collapse(e)
    return unify(a, b)


def _fail(exprs: Iterable[Expr], why: str) -> bool:
    for e in exprs:
        freeze(e, why)
    return False


def _unify_prod(left: list[Expr], right: list[Expr]) -> bool:
    fine = True
    while left and right:
        x, y = norm(left[0]), norm(right[0])
        if x.size == y.size:
            del left[0], right[0]
            fine &= unify(x, y)
            continue
        longer, e, outer = (left, x, y.size) if x.size > y.size else (right, y, x.size)
        halves = split_outer(e, outer)
        if halves is None:
            return _fail([*left, *right], "merged axes with boundaries that do not line up")
        longer[:1] = halves
    return fine


def _unify_cat(a: Expr, b: Expr) -> bool:
    left, right, fine = _terms(a), _terms(b), True
    while left and right:
        x, y = left[0], right[0]
        if x.size == y.size:
            del left[0], right[0]
            fine &= unify(x, y)
        else:
            longer, e, first = (left, x, y.size) if x.size > y.size else (right, y, x.size)
            halves = split_at(e, first)
            if halves is None:
                return _fail([*left, *right], "concatenated axes with boundaries that do not line up")
            longer[:1] = halves
        left, right = ([t for e in side for t in _terms(e)] for side in (left, right))
    return fine


def _terms(e: Expr) -> list[Expr]:
    """The segments of an expression: of a concatenation, or of a product whose outermost factor is one."""
    e = norm(e)
    if isinstance(e, Cat):
        return [t for p in e.parts for t in _terms(p)]
    if isinstance(e, Prod) and e.parts and isinstance(e.parts[0], Cat):
        return [t for head in e.parts[0].parts for t in _terms(Prod((head, *e.parts[1:])))]
    return [e] if e.size else []


def split_outer(e: Expr, outer: int, literal: bool = False) -> list[Expr] | None:
    """e = hi x lo with hi of size `outer`, or None. `literal`: hi is fixed by the code, so it merely numbers segments of e."""
    e = norm(e)
    if outer in (1, e.size) or e.size % outer:
        return None if e.size % outer else [ONE, e] if outer == 1 else [e, ONE]
    inner = e.size // outer
    if isinstance(e, Atom) and e.key:
        return None
    if isinstance(e, Atom):
        if literal:
            segments = [Atom(inner) for _ in range(outer)]
            define(e, Cat(segments))
            return _numbered(segments)
        hi, lo = Atom(outer), Atom(inner)
        define(e, Prod((hi, lo)))
        return [hi, lo]
    if isinstance(e, Fam):
        if any(isinstance(f, Cat | Fam) for p in e.parts for f in factors(p)):
            collapse(e)
            return split_outer(e.parts[0], outer)
        pairs = [split_outer(p, outer) for p in e.parts]
        found = [pair for pair in pairs if pair is not None]
        return None if len(found) < len(pairs) else [norm(Fam(e.key, [pair[i] for pair in found])) for i in (0, 1)]
    if isinstance(e, Prod):
        return _split_product(list(e.parts), outer, literal)
    return _split_segments(e, outer)


def _numbered(segments: Sequence[Expr]) -> list[Expr]:
    key = Atom(len(segments), "numbers the parts of a fused axis")
    key.key = True
    return [key, norm(Fam(key, segments))]


def _split_product(parts: list[Expr], outer: int, literal: bool) -> list[Expr] | None:
    taken: list[Expr] = []
    while outer > 1:
        part = parts.pop(0)
        if outer % part.size == 0:
            taken.append(part)
            outer //= part.size
            continue
        halves = split_outer(part, outer, literal) if part.size > outer else None
        if halves is None:
            return None
        taken.append(halves[0])
        parts.insert(0, halves[1])
        outer = 1
    return [norm(Prod(taken)), norm(Prod(parts))]


def _split_segments(e: Cat, outer: int) -> list[Expr] | None:
    width = e.parts[0].size
    if outer % len(e.parts) == 0 and all(p.size == width for p in e.parts):
        return _split_product(_numbered(e.parts), outer, False)
    rest: Expr = e
    rows: list[Expr] = []
    for _ in range(outer - 1):
        halves = split_at(rest, e.size // outer)
        if halves is None:
            return None
        rows.append(halves[0])
        rest = halves[1]
    return _numbered([*rows, rest])


def split_at(e: Expr, first: int) -> tuple[Expr, Expr] | None:
    """e = [head | tail] with a head of `first` indices, or None when the cut falls inside a row of a product."""
    e = norm(e)
    if first in (0, e.size):
        return (ZERO, e) if first == 0 else (e, ZERO)
    if isinstance(e, Atom) and e.key:
        return None
    if isinstance(e, Atom):
        head, tail = fresh(first), fresh(e.size - first)
        define(e, Cat((head, tail)))
        return head, tail
    if isinstance(e, Fam):
        pairs = [split_at(p, first) for p in e.parts]
        found = [pair for pair in pairs if pair is not None]
        if len(found) < len(pairs):
            return None
        return norm(Fam(e.key, [pair[0] for pair in found])), norm(Fam(e.key, [pair[1] for pair in found]))
    terms = _terms(e)
    if len(terms) == 1:
        inner = math.prod(p.size for p in e.parts[1:])
        halves = None if first % inner else split_at(e.parts[0], first // inner)
        if halves is None:
            return None
        return norm(Prod((halves[0], *e.parts[1:]))), norm(Prod((halves[1], *e.parts[1:])))
    before: list[Expr] = []
    while terms and first >= terms[0].size:
        first -= terms[0].size
        before.append(terms.pop(0))
    if first:
        halves = split_at(terms[0], first)
        if halves is None:
            return None
        before.append(halves[0])
        terms[0] = halves[1]
    return norm(Cat(before)), norm(Cat(terms))


def take(e: Expr, start: int, stop: int, step: int = 1) -> Expr:
    """The axis of a slice; freezes where the slice cannot be told apart."""
    size = len(range(start, stop, step))
    if is_fixed(e):
        return fresh(size, next((a.frozen for a in atoms(e)), "part of an axis that is fixed"))
    if step > 1 and start < step and stop == e.size and e.size % step == 0:
        halves = split_outer(e, e.size // step)
        if halves is not None:
            freeze(halves[1], "sliced with a stride")
            return norm(halves[0])
    first = split_at(e, stop) if step == 1 else None
    second = split_at(first[0], start) if first else None
    if second is None:
        why = "sliced with a stride" if step > 1 else "sliced inside a row of a merged axis"
        freeze(e, why)
        return fresh(size, why)
    return norm(second[1])


def reshape(dims: Sequence[Expr], sizes: Sequence[int], literal: Iterable[int] = ()) -> list[Expr]:
    """The axes after `view(sizes)`. `literal`: positions of small sizes that stand as plain numbers in the code."""
    if any(d.size == 0 for d in dims):
        return [fresh(s, "empty tensor") for s in sizes]
    pool = [f for d in dims for f in factors(d) if f.size != 1]
    out: list[Expr] = []
    fixed = set(literal)
    for position, size in enumerate(sizes):
        got: list[Expr] = []
        need = size
        while need > 1:
            top = norm(pool.pop(0))
            if isinstance(top, Prod):
                pool[:0] = top.parts
            elif need % top.size == 0:
                got.append(top)
                need //= top.size
            else:
                halves = split_outer(top, need, position in fixed) if top.size > need else None
                if halves is None:
                    _fail([top, *pool, *got], "reshape crosses the boundary of an axis")
                    return [*out, *(fresh(s, "reshape crosses the boundary of an axis") for s in sizes[len(out) :])]
                got.append(halves[0])
                pool.insert(0, halves[1])
                need = 1
        out.append(norm(Prod(got)))
    return out
