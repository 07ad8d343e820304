"""Aligns axis expressions: unites, splits and reshapes them, and refines atoms where the parts have to line up.

    unify(a, b)                     a and b lose the same units from now on (as in `x + y`)
    reshape([width], [3, 4])        [heads, head_dim], and `width` is now Prod((heads, head_dim))

Where two structures cannot be aligned, the atoms involved are frozen with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .expressions import ONE, ZERO, Atom, Cat, Expr, Fam, Prod, atoms, define, factors, families, freeze, fresh, is_fixed, norm

_KEY = "numbers the parts of a fused axis"


def collapse(fam: Fam) -> bool:
    """Couples the members of a family, so that the same units are removed at every index of its key."""
    fine = True
    for part in fam.parts[1:]:
        fine &= unify(fam.parts[0], part)
    return fine


def closed(e: Expr) -> Expr:
    """Returns the expression without families, after collapsing those it has."""
    held = families(e)
    for fam in held:
        collapse(fam)
    if not held or not families(e):
        return norm(e)
    # members that lose the same units may still be different expressions, such as (a*2 | 2) and (a | 1)*2
    return norm(Prod(f.parts[0] if isinstance(f, Fam) else f for f in factors(e)))


def unify(a: Expr, b: Expr) -> bool:
    """Couples two axes, so that both lose the same units. If they cannot be aligned, freezes both and returns False."""
    a, b = norm(a), norm(b)
    if a is b:
        return True
    if a.size != b.size:
        return _fail([a, b], f"axes of {a.size} and {b.size} units meet")
    if is_fixed(a) and is_fixed(b) and not (_is_key(a) and _is_key(b)):
        return True
    if isinstance(a, Fam) or isinstance(b, Fam):
        return _unify_family(a, b)
    if isinstance(a, Atom):
        return _unify_atom(a, closed(b))
    if isinstance(b, Atom):
        return _unify_atom(b, closed(a))
    if isinstance(a, Cat) or isinstance(b, Cat):
        return _unify_cat(a, b)
    return _unify_prod(list(a.parts), list(b.parts))


def _is_key(e: Expr) -> bool:
    return isinstance(e, Atom) and e.key


def _unify_family(a: Expr, b: Expr) -> bool:
    if isinstance(a, Fam) and isinstance(b, Fam) and norm(a.key) is norm(b.key):
        answers = [unify(x, y) for x, y in zip(a.parts, b.parts)]  # a list, so that every pair is unified even after a failure
        return all(answers)
    for e in (a, b):
        if isinstance(e, Fam):
            collapse(e)
    return unify(a, b)


def _unify_atom(atom: Atom, other: Expr) -> bool:
    a = norm(atom)  # closing `other` may have refined it
    if a is other:
        return True
    if not isinstance(a, Atom):
        return unify(a, other)
    if a.key and not isinstance(other, Atom):
        return _fail([a, other], _KEY)
    define(a, other)
    return True


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
    left, right, fine = _segments(a), _segments(b), True
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
        left, right = ([s for e in side for s in _segments(e)] for side in (left, right))
    return fine


def _segments(e: Expr) -> list[Expr]:
    """Returns the segments of a concatenation, or of a product whose outermost factor is a concatenation."""
    e = norm(e)
    if isinstance(e, Cat):
        return [s for p in e.parts for s in _segments(p)]
    if isinstance(e, Prod) and e.parts and isinstance(e.parts[0], Cat):
        return [s for head in e.parts[0].parts for s in _segments(Prod((head, *e.parts[1:])))]
    return [e] if e.size else []


def split_outer(e: Expr, outer: int, literal: bool = False) -> list[Expr] | None:
    """Splits e into [hi, lo] with e = hi * lo and hi of size `outer`, or returns None if that is not possible.

    `literal`: `outer` is a plain number in the model's code, such as the 3 in `view(..., 3, n)`. Then hi only numbers segments
    of e, which keep units of their own.
    """
    e = norm(e)
    if e.size % outer:
        return None
    if outer == 1:
        return [ONE, e]
    if outer == e.size:
        return [e, ONE]
    if isinstance(e, Atom):
        return _split_atom(e, outer, literal)
    if isinstance(e, Fam):
        return _split_family(e, outer)
    if isinstance(e, Prod):
        return _split_product(list(e.parts), outer, literal)
    return _split_concatenation(e, outer)


def _split_atom(e: Atom, outer: int, literal: bool) -> list[Expr] | None:
    inner = e.size // outer
    if e.key:
        return None
    if literal:
        segments = [Atom(inner) for _ in range(outer)]
        define(e, Cat(segments))
        return _numbered(segments)
    hi, lo = Atom(outer), Atom(inner)
    define(e, Prod((hi, lo)))
    return [hi, lo]


def _split_family(e: Fam, outer: int) -> list[Expr] | None:
    if any(isinstance(f, Cat | Fam) for p in e.parts for f in factors(p)):
        collapse(e)
        return split_outer(e.parts[0], outer)
    halves = _in_family(e, [split_outer(p, outer) for p in e.parts])
    return halves and [*halves]


def _in_family(e: Fam, pairs: Sequence[Sequence[Expr] | None]) -> tuple[Expr, Expr] | None:
    """Combines the two halves of each member into two families; None if a member could not be split."""
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(pairs):
        return None
    return norm(Fam(e.key, [pair[0] for pair in found])), norm(Fam(e.key, [pair[1] for pair in found]))


def _numbered(segments: Sequence[Expr]) -> list[Expr]:
    """Returns the two axes of segments that are stacked: a key that numbers them, and the family of the segments."""
    key = Atom(len(segments), _KEY)
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


def _split_concatenation(e: Cat, outer: int) -> list[Expr] | None:
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
    """Splits e into (head, tail) with `first` indices in the head, or returns None if the cut is inside a row of a product."""
    e = norm(e)
    if first == 0:
        return ZERO, e
    if first == e.size:
        return e, ZERO
    if isinstance(e, Atom):
        if e.key:
            return None
        head, tail = fresh(first), fresh(e.size - first)
        define(e, Cat((head, tail)))
        return head, tail
    if isinstance(e, Fam):
        return _in_family(e, [split_at(p, first) for p in e.parts])
    segments = _segments(e)
    return _split_rows(e, first) if len(segments) == 1 else _split_segments(segments, first)


def _split_rows(e: Prod | Cat, first: int) -> tuple[Expr, Expr] | None:
    """Splits a product between two rows, that is along its outermost factor."""
    inner = math.prod(p.size for p in e.parts[1:])
    halves = None if first % inner else split_at(e.parts[0], first // inner)
    if halves is None:
        return None
    return norm(Prod((halves[0], *e.parts[1:]))), norm(Prod((halves[1], *e.parts[1:])))


def _split_segments(segments: list[Expr], first: int) -> tuple[Expr, Expr] | None:
    before: list[Expr] = []
    while segments and first >= segments[0].size:
        first -= segments[0].size
        before.append(segments.pop(0))
    if first:
        halves = split_at(segments[0], first)
        if halves is None:
            return None
        before.append(halves[0])
        segments[0] = halves[1]
    return norm(Cat(before)), norm(Cat(segments))


def take(e: Expr, start: int, stop: int, step: int = 1) -> Expr:
    """Returns the axis of the slice e[start:stop:step]. Freezes e if the slice cannot be expressed by its parts."""
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
    """Returns the axes after `view(sizes)`. `literal`: positions of small sizes that are plain numbers in the model's code."""
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
