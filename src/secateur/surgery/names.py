"""Names of groups, and the globs of `exclude=` and `channels=` that select groups by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from glob import escape

from torch import nn

from .._tree import nearest, nearest_glob
from ..axes import Group, Member
from ..edit import owned_tensors, without
from ..trace import Trace


def label(group: Group) -> str:
    """The first tensor that produces the units of a group (else the first that carries them), with the dim."""
    first = first_member(group)
    return f"{first.tensor}[{first.dim}]"


def first_member(group: Group) -> Member:
    """The member after which a group is named."""
    return next((m for m in group.members if m.role == "produce"), group.members[0])


def names_of(trace: Trace) -> dict[Group, str]:
    """A unique name for every group: its label, numbered where one dim carries several groups (heads and head channels)."""
    seen: Counter[str] = Counter()
    names: dict[Group, str] = {}
    for group in trace.groups:
        base = label(group)
        seen[base] += 1
        names[group] = base if seen[base] == 1 else f"{base}#{seen[base]}"
    return names


def matches(name: str, globs: Iterable[str]) -> bool:
    """True if a glob matches this name or a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), glob) for glob in globs for n in range(len(parts)))


def check_globs(model: nn.Module, argument: str, globs: Iterable[str], names: Iterable[str]) -> None:
    """Raises ValueError for a glob that matches no module of the model, and none of these names of tensors and groups."""
    globs = tuple(globs)
    modules = [name for name, _ in model.named_modules() if name] if globs else []
    known = (*names, *modules)
    for glob in globs:
        if not any(glob == name or fnmatchcase(name, glob) for name in known):
            raise ValueError(f"{argument}={glob!r} matches no tensor and no module.{nearest_glob(glob, known)}")


def excluded(trace: Trace, globs: Iterable[str]) -> dict[Group, str]:
    """The groups with a member that is excluded: every dim of an excluded tensor keeps its size."""
    globs = tuple(globs)
    return {g: why for g in trace.prunable if (why := _why_excluded(g, globs))} if globs else {}


def _why_excluded(group: Group, globs: tuple[str, ...]) -> str:
    """Why a group is excluded; "" if it is not. Names the members that no glob matches, since they are frozen with it."""
    members = {f"{m.tensor}[{m.dim}]": [glob for glob in globs if matches(m.tensor, [glob])] for m in group.members}
    named = [name for name, found in members.items() if found]
    others = [name for name, found in members.items() if not found]
    if not named or not others:
        return "excluded" if named else ""
    glob = members[named[0]][0]
    return f"excluded: exclude={glob!r} keeps the size of {named[0]}, which has the same units as {_several(others)}"


def _several(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ratios_by_group(trace: Trace, ratios: Mapping[str, float]) -> dict[Group, float]:
    """The ratio of each group that `channels={glob: ratio}` names. Of several globs that match, the last one counts.

    A glob names a group by the group's own name, or by a tensor that produces its units, or by a module that contains one.
    """
    names = names_of(trace)
    found: dict[Group, float] = {}
    for glob, ratio in ratios.items():
        for group in trace.prunable:
            makers = [m.tensor for m in group.members if m.role == "produce"] or [m.tensor for m in group.members]
            if glob == names[group] or fnmatchcase(names[group], glob) or any(matches(name, [glob]) for name in makers):
                found[group] = ratio
    return found


def check_ratios(trace: Trace, ratios: Mapping[str, float], left: Mapping[Group, str]) -> None:
    """Raises ValueError for a glob that names no group, or none that may lose units."""
    names = names_of(trace)
    check_globs(trace.model, "channels", ratios, (*trace.dims, *names.values()))
    for glob in ratios:
        groups = ratios_by_group(trace, {glob: 1.0})
        if not groups:
            whole = [why for name, why in trace.skipped.items() if matches(name, [glob])]
            why = f" Its axes stay whole: {', '.join(dict.fromkeys(whole))}." if whole else ""
            free = [names[g] for g in trace.prunable if g not in left]
            raise ValueError(f"channels={glob!r} produces no units that can be removed.{why}{nearest(glob, free)}")
        if all(g in left for g in groups):
            raise ValueError(f"channels={glob!r} selects only groups that are left whole: {left[next(iter(groups))]}")


def renamed(model: nn.Module, drop: Mapping[str, list[int]], globs: Iterable[str]) -> tuple[str, ...]:
    """Globs for the model without the blocks in `drop` that match the same modules and tensors as `globs` do with them.

    Blocks behind a removed one move up, so their names change.
    """
    if not drop:
        return tuple(globs)
    globs = tuple(globs)

    def names() -> dict[int, str]:
        modules = {id(module): name for name, module in model.named_modules() if name}
        return modules | {key: name for key, (name, _) in owned_tensors(model).items()}

    before = names()
    with without(model, drop):
        after = names()
    meant = {after[key] for key, name in before.items() if key in after and any(fnmatchcase(name, glob) for glob in globs)}
    found = [escape(name) for name in sorted(meant) if not matches(name.rpartition(".")[0], map(escape, meant))]
    tensors = {name: after[key] for key, name in before.items() if key in after}
    for tensor, bracket, rest in (glob.partition("[") for glob in globs):  # the name of a group: a tensor and its dim
        found += [f"{tensors[tensor]}{bracket}{rest}"] if bracket and tensor in tensors else []
    return tuple(found)
