"""The algebra of axes: every dimension of a tensor is an expression over atoms.

`Atom` is a leaf of independent units, `Prod` a row-major product (merged dimensions), `Cat` a concatenation. An atom may later
be *defined* as an expression of its own size, or united with another atom; both only narrow which units may go together, so
every step is sound. A proper part is strictly smaller than the whole, so no definition is cyclic and everything terminates.
`Fam` is a factor whose units depend on the index of another axis: the segments of `x.view(..., 3, n)` before one is selected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_serial = itertools.count()


class Atom:
    """`size` units that may be removed one by one. `ref`: what it turned out to be; `frozen`: why no unit may go."""

    __slots__ = ("flags", "frozen", "key", "ref", "serial", "size", "tags")

    def __init__(self, size: int, frozen: str | None = None, tags: frozenset = frozenset()) -> None:
        self.size = int(size)
        self.ref: Expr | None = None
        self.frozen = frozen
        self.flags: frozenset[str] = frozenset()
        self.tags = tags
        self.key = False  # a family hangs on its index: it stays an atom
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
    """One expression for every index of the axis `key`, all of one size; `key` is another dimension of the same tensor."""

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
    """A new axis. One of size 1 or 0 has no unit to choose from, so it is no atom."""
    return ONE if size == 1 else Atom(size, frozen) if size else ZERO


def resolve(atom: Atom) -> Expr:
    """What an atom stands for now, with the path shortened."""
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
    """Definitions resolved, nesting flattened, factors of size 1 and empty segments dropped."""
    if isinstance(e, Atom):
        return e if e.ref is None else resolve(e)
    if e is ONE or e is ZERO:
        return e
    if (
        all(isinstance(p, Atom) and p.ref is None and p.size > 1 for p in e.parts)
        and len(e.parts) > 1
        and not isinstance(e, Fam)
    ):
        return e
    parts = [norm(p) for p in e.parts]
    if isinstance(e, Fam):
        alike = all(same(parts[0], p) for p in parts[1:]) or all(is_fixed(p) for p in parts)
        return parts[0] if alike else Fam(e.key, parts)
    if isinstance(e, Cat):
        flat = [q for p in parts for q in (p.parts if isinstance(p, Cat) else (p,)) if q.size]
        return flat[0] if len(flat) == 1 else Cat(flat)
    if any(p.size == 0 for p in parts):
        return ZERO
    flat = [q for p in parts for q in (p.parts if isinstance(p, Prod) else (p,)) if q.size != 1]
    flat = _close(flat)
    return flat[0] if len(flat) == 1 else Prod(flat) if flat else ONE


def _close(factors: list[Expr]) -> list[Expr]:
    """key x ... x family is the concatenation of the family's segments."""
    if not any(isinstance(f, Fam) for f in factors):
        return factors
    for i, key in enumerate(factors):
        tail = factors[i + 1 :]
        if isinstance(key, Atom) and any(_keyed(f, key) for f in tail):
            segments = [norm(Prod([pick(f, key, k) for f in tail])) for k in range(key.size)]
            return [*factors[:i], norm(Cat(segments))]
    return factors


def _keyed(e: Expr, key: Expr) -> bool:
    return isinstance(e, Fam) and norm(e.key) is key


def pick(e: Expr, key: Expr, index: int) -> Expr:
    """The expression at one index of the axis `key`; anything that does not depend on it stays."""
    e = norm(e)
    if isinstance(e, Fam):
        return norm(e.parts[index]) if norm(e.key) is key else e
    return norm(Prod([pick(p, key, index) for p in e.parts])) if isinstance(e, Prod) else e


def factors(e: Expr) -> list[Expr]:
    """The factors of a dimension, outermost first."""
    e = norm(e)
    return list(e.parts) if isinstance(e, Prod) else [e]


def families(e: Expr) -> list[Fam]:
    """The families among the factors of a dimension."""
    e = norm(e)
    return [] if isinstance(e, Atom) else [f for f in factors(e) if isinstance(f, Fam)]


def atoms(e: Expr) -> list[Atom]:
    """All atoms of an expression, in order, with repetition."""
    e = norm(e)
    if isinstance(e, Atom):  # most are
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
    """Whether two expressions are one and the same."""
    a, b = norm(a), norm(b)
    if a is b:
        return True
    if isinstance(a, Atom) or isinstance(b, Atom) or type(a) is not type(b) or len(a.parts) != len(b.parts):
        return False
    return all(same(x, y) for x, y in zip(a.parts, b.parts))


def freeze(e: Expr, why: str) -> None:
    """No unit of this axis may go; the first reason stays."""
    for atom in atoms(e):
        atom.frozen = atom.frozen or why


def is_fixed(e: Expr) -> bool:
    """Whether no unit of the axis may go, so that nothing about its structure matters."""
    e = norm(e)
    return e.frozen is not None if isinstance(e, Atom) else all(is_fixed(p) for p in e.parts)


def flag(e: Expr, name: str) -> None:
    """Remember that something other than a plain sum runs over this axis."""
    for atom in atoms(e):
        atom.flags |= {name}


def define(atom: Atom, e: Expr) -> None:
    """From now on the atom is this expression, of the same size; what is known of the atom holds for its parts."""
    if isinstance(e, Atom):  # the older one stays, so that chains stay short
        atom, e = (atom, e) if atom.serial > e.serial else (e, atom)
    for part in atoms(e):
        part.frozen = part.frozen or atom.frozen
        part.flags |= atom.flags
        part.tags |= atom.tags
        part.key |= atom.key
    atom.ref = e


def keep_mask(e: Expr, keep: Mapping[Atom, Tensor]) -> Tensor:
    """Which indices of the axis stay, as a bool tensor; an atom that `keep` does not name stays whole."""
    e = norm(e)
    assert not isinstance(e, Fam), f"{e} has no mask of its own"
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
    """The size of the axis when each atom keeps `counts[atom]` units (all of them where not named)."""
    e = norm(e)
    if isinstance(e, Atom):
        return counts.get(e, e.size)
    if isinstance(e, Fam):
        return new_size(e.parts[0], counts)
    if isinstance(e, Cat):
        return sum(new_size(p, counts) for p in e.parts)
    return math.prod(new_size(p, counts) for p in e.parts)
