"""Axis expressions: every dimension of a tensor is written as an expression over atoms.

An atom stands for units that can be removed one by one, for example the channels of a layer. `Prod` is a row-major product
(merged dimensions), `Cat` a concatenation. For an atom `width` of 12 units:

    x.view(3, 4)         refines  width  into  Prod((heads, head_dim)): removing head 0 removes the indices 0 to 3 of `width`
    torch.cat([x, y])    has the axis          Cat((width of x, width of y))

Atoms are refined while a model is traced. An atom can be *defined* as an expression of the same size, or united with another
atom. Both steps only restrict which units can be removed independently, so no earlier conclusion becomes wrong. The parts of an
expression are strictly smaller than the expression, so definitions are never cyclic.

`Fam` (family) is a factor whose units depend on the index along another axis. `x.view(..., 3, n)` of a fused query, key and
value projection has such a factor until code selects one of the three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

_serial = itertools.count()


class Atom:
    """`size` units that can be removed one by one.

    `ref` is the expression that the atom was defined as, or None. `frozen` says why no unit can be removed, or is None. `flags`
    name the reductions that run over the axis. `tags` are marks that survive refinement. `serial` gives the age.
    """

    __slots__ = ("flags", "frozen", "key", "ref", "serial", "size", "tags")

    def __init__(self, size: int, frozen: str | None = None, tags: frozenset = frozenset()) -> None:
        self.size = int(size)
        self.ref: Expr | None = None
        self.frozen = frozen
        self.flags: frozenset[str] = frozenset()
        self.tags = tags
        self.key = False  # True if a family depends on the index along this atom: then it cannot be refined
        self.serial = next(_serial)

    def __repr__(self) -> str:
        return f"a{self.serial}:{self.size}{'!' if self.frozen else ''}"


class Prod:
    """A row-major product: the index of the last part runs fastest."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: Iterable[Expr]) -> None:
        self.parts = tuple(parts)
        self.size = math.prod(part.size for part in self.parts)

    def __repr__(self) -> str:
        return "(" + "*".join(map(repr, self.parts)) + ")"


class Cat:
    """A concatenation: the parts one after the other."""

    __slots__ = ("parts", "size")

    def __init__(self, parts: Iterable[Expr]) -> None:
        self.parts = tuple(parts)
        self.size = sum(part.size for part in self.parts)

    def __repr__(self) -> str:
        return "[" + "|".join(map(repr, self.parts)) + "]"


class Fam:
    """A family: one expression for each index of the axis `key`, all of one size. `key` is another dimension of the tensor."""

    __slots__ = ("key", "parts", "size")

    def __init__(self, key: Atom, parts: Iterable[Expr]) -> None:
        self.key = key
        self.parts = tuple(parts)
        self.size = self.parts[0].size

    def __repr__(self) -> str:
        return f"{{{self.key}:" + ",".join(map(repr, self.parts)) + "}"


Expr = Atom | Prod | Cat | Fam
ONE = Prod(())
ZERO = Cat(())


def fresh(size: int, frozen: str | None = None) -> Expr:
    """Returns a new axis. An axis of size 0 or 1 has no units to choose from, so it is a constant and not an atom."""
    return ONE if size == 1 else Atom(size, frozen) if size else ZERO


def resolve(atom: Atom) -> Expr:
    """Follows the definitions of an atom to the end, and shortens the path for the next call."""
    seen: list[Atom] = []
    at: Expr = atom
    while isinstance(at, Atom) and at.ref is not None:
        seen.append(at)
        at = at.ref
    if seen and not isinstance(at, Atom):
        at = norm(at)
    for passed in seen:
        passed.ref = at
    return at


def norm(e: Expr) -> Expr:
    """Returns the normal form: definitions resolved, nesting flattened, factors of size 1 and empty segments dropped."""
    if isinstance(e, Atom):
        return e if e.ref is None else resolve(e)
    if e is ONE or e is ZERO or _is_normal(e):
        return e
    return _NORMALIZE[type(e)](e, [norm(p) for p in e.parts])


def _is_normal(e: Prod | Cat | Fam) -> bool:
    """Fast path: a product or concatenation of several undefined atoms is in normal form."""
    if len(e.parts) < 2 or isinstance(e, Fam):
        return False
    for p in e.parts:  # noqa: SIM110  (a plain loop is faster than all() here, and tracing calls this very often)
        if not isinstance(p, Atom) or p.ref is not None or p.size < 2:
            return False
    return True


def _normal_family(e: Fam, parts: list[Expr]) -> Expr:
    alike = all(same(parts[0], p) for p in parts[1:]) or all(is_fixed(p) for p in parts)
    return parts[0] if alike else Fam(e.key, parts)


def _normal_concatenation(_: Cat, parts: list[Expr]) -> Expr:
    flat = [q for p in parts for q in (p.parts if isinstance(p, Cat) else (p,)) if q.size]
    return flat[0] if len(flat) == 1 else Cat(flat)


def _normal_product(_: Prod, parts: list[Expr]) -> Expr:
    if any(p.size == 0 for p in parts):
        return ZERO
    flat = _merge_families([q for p in parts for q in (p.parts if isinstance(p, Prod) else (p,)) if q.size != 1])
    return flat[0] if len(flat) == 1 else Prod(flat) if flat else ONE


_NORMALIZE: dict[type, Callable[..., Expr]] = {Fam: _normal_family, Cat: _normal_concatenation, Prod: _normal_product}


def _merge_families(factors: list[Expr]) -> list[Expr]:
    """Replaces the factors key, ..., family by the concatenation of the family's segments."""
    if not any(isinstance(f, Fam) for f in factors):
        return factors
    for i, key in enumerate(factors):
        tail = factors[i + 1 :]
        if isinstance(key, Atom) and any(_depends_on(f, key) for f in tail):
            segments = [norm(Prod([pick(f, key, k) for f in tail])) for k in range(key.size)]
            return [*factors[:i], norm(Cat(segments))]
    return factors


def _depends_on(e: Expr, key: Expr) -> bool:
    return isinstance(e, Fam) and norm(e.key) is key


def pick(e: Expr, key: Expr, index: int) -> Expr:
    """Returns the expression at one index of the axis `key`. Factors that do not depend on it stay as they are."""
    e = norm(e)
    if isinstance(e, Fam):
        return norm(e.parts[index]) if norm(e.key) is key else e
    return norm(Prod([pick(p, key, index) for p in e.parts])) if isinstance(e, Prod) else e


def factors(e: Expr) -> list[Expr]:
    """Returns the factors of a dimension, outermost first."""
    e = norm(e)
    return list(e.parts) if isinstance(e, Prod) else [e]


def families(e: Expr) -> list[Fam]:
    """Returns the families among the factors of a dimension."""
    e = norm(e)
    if isinstance(e, Atom):
        return []
    return [f for f in (e.parts if isinstance(e, Prod) else (e,)) if isinstance(f, Fam)]


def atoms(e: Expr) -> list[Atom]:
    """Returns all atoms of an expression, in order, with repetition."""
    e = norm(e)
    if isinstance(e, Atom):  # fast path: most expressions are atoms
        return [e]
    found: list[Atom] = []
    stack: list[Expr] = [e]
    while stack:
        top = stack.pop()
        if isinstance(top, Atom):
            found.append(top)
        else:
            stack.extend(reversed(top.parts))
    return found


def same(a: Expr, b: Expr) -> bool:
    """True if two expressions have the same normal form."""
    a, b = norm(a), norm(b)
    if a is b:
        return True
    if isinstance(a, Atom) or isinstance(b, Atom) or type(a) is not type(b) or len(a.parts) != len(b.parts):
        return False
    return all(same(x, y) for x, y in zip(a.parts, b.parts))


def freeze(e: Expr, why: str) -> None:
    """Forbids removing any unit of this axis. The first reason is kept."""
    for atom in atoms(e):
        atom.frozen = atom.frozen or why


def is_fixed(e: Expr) -> bool:
    """True if no unit of the axis can be removed. Then its structure does not matter."""
    e = norm(e)
    return e.frozen is not None if isinstance(e, Atom) else all(is_fixed(p) for p in e.parts)


def flag(e: Expr, name: str) -> None:
    """Records that an operation other than a plain sum runs over this axis."""
    for atom in atoms(e):
        atom.flags |= {name}


def define(atom: Atom, e: Expr) -> None:
    """Defines an atom as an expression of the same size. The parts inherit the atom's reason, flags and tags."""
    if isinstance(e, Atom):  # keep the older atom, so that chains of definitions stay short
        atom, e = (atom, e) if atom.serial > e.serial else (e, atom)
    for part in atoms(e):
        part.frozen = part.frozen or atom.frozen
        part.flags |= atom.flags
        part.tags |= atom.tags
        part.key |= atom.key
    atom.ref = e


def keep_mask(e: Expr, keep: Mapping[Atom, Tensor]) -> Tensor:
    """Returns a bool tensor with True at the indices of the axis that stay. Atoms that `keep` does not name stay whole."""
    e = norm(e)
    assert not isinstance(e, Fam), f"{e} is a family: its mask depends on the index along {e.key}"
    if isinstance(e, Atom):
        return keep[e].cpu() if e in keep else torch.ones(e.size, dtype=torch.bool)
    masks = [keep_mask(p, keep) for p in e.parts]
    if isinstance(e, Cat):
        return torch.cat(masks) if masks else torch.ones(0, dtype=torch.bool)
    mask = torch.ones(1, dtype=torch.bool)
    for m in masks:
        mask = (mask[:, None] & m[None]).reshape(-1)
    return mask


def new_size(e: Expr, counts: Mapping[Atom, int]) -> int:
    """Returns the size of the axis when each atom keeps `counts[atom]` units. Atoms that are not named keep all."""
    e = norm(e)
    if isinstance(e, Atom):
        return counts.get(e, e.size)
    if isinstance(e, Fam):
        return new_size(e.parts[0], counts)
    if isinstance(e, Cat):
        return sum(new_size(p, counts) for p in e.parts)
    return math.prod(new_size(p, counts) for p in e.parts)


def axis_signature(e: Expr) -> tuple:
    """Returns a hashable value that is equal for expressions with the same normal form."""
    e = norm(e)
    if isinstance(e, Atom):
        return ("atom", e.serial)
    parts = e.parts[:1] if isinstance(e, Fam) else e.parts
    return (type(e).__name__, *map(axis_signature, parts))
