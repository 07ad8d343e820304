"""Removes whole experts from mixtures of experts: their weights, and their rows of the router.

Experts are scored by REAP (Lasby et al., 2025): the mean, over the tokens that the router sends to an expert, of its gate times
the norm of its output. The router then chooses among fewer experts, so tokens go elsewhere: such a cut is never exact.

A mixture is a module that holds experts (tensors with a matrix for each expert, or a list of modules) and, beside them, a
router with a row for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..edit import Attribute, Cuts, Inputs, apply_cuts_, copied, eval_mode, owned_tensors, run
from ..progress import track
from ..select import keep_largest
from ..stats import on_batch, split_batch, valid_positions
from .cut import held_objects_of
from .names import matches

INEXACT = "the router chooses among fewer experts, so tokens go to others"
_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts", "n_experts"}
_CHOSEN = {"top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"}
_GROUPED = ("n_group", "num_expert_group")


@dataclass
class Mixture:
    """A mixture of experts: the module that holds it, its experts, its router, and what the data shows of each expert.

    `sums` are sums over tokens of gate times norm, and `tokens` how many tokens each expert was given.
    """

    path: str
    experts: str
    router: str
    count: int
    listed: bool
    sums: Tensor = field(default_factory=lambda: torch.zeros(0))
    tokens: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        self.sums, self.tokens = (torch.zeros(self.count, dtype=torch.float64) for _ in range(2))

    @property
    def scores(self) -> Tensor:
        """The mean of gate times norm; zero for an expert without tokens."""
        return self.sums / self.tokens.clamp(min=1)

    def add(self, expert: int, values: Tensor) -> None:
        self.sums[expert] += float(values.double().sum())
        self.tokens[expert] += len(values)


class RemovedExperts(NamedTuple):
    """A copy of the model without some experts. `kept`: for each mixture the experts that stay, by their old numbers."""

    model: nn.Module
    cuts: Cuts
    kept: list[tuple[Mixture, list[int]]]
    skipped: dict[str, str]

    @property
    def note(self) -> str:
        """Names the experts that saw no token."""
        idle = [(m.experts, (m.tokens == 0).nonzero()[:, 0].tolist()) for m, _ in self.kept]
        named = [f"experts {', '.join(map(str, which))} of {name}" for name, which in idle if which]
        return f"no token of data= reached {'; '.join(named)}" if named else ""


def remove_experts(
    model: nn.Module, inputs: Inputs, part: float, batches: Sequence[Any], exclude: Sequence[str] = ()
) -> RemovedExperts:
    """Keeps this part of the experts of each mixture. The model is unchanged."""
    skipped: dict[str, str] = {}
    mixtures = [m for m in find_mixtures(model, skipped) if not matches(m.experts, exclude)]
    _measure(model, mixtures, batches)
    for m in [m for m in mixtures if not bool(m.tokens.any())]:
        skipped[m.experts] = "no call of its experts with tokens and gates was seen on data="
    mixtures = [m for m in mixtures if m.experts not in skipped]
    if not mixtures:
        why = "; ".join(f"{name}: {why}" for name, why in list(skipped.items())[:4]) or "none has a router beside its experts"
        raise ValueError(f"{type(model).__name__} has no mixture whose experts can be removed ({why}). The model is unchanged.")
    kept = [(m, _kept(m, part)) for m in mixtures]
    cuts = _cuts(model, kept)
    small = apply_cuts_(copied(model), cuts)
    try:
        run(small, *inputs)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run with fewer experts ({type(error).__name__}: {error}). The model is unchanged."
        ) from error
    return RemovedExperts(small, cuts, kept, skipped)


def _kept(mixture: Mixture, part: float) -> list[int]:
    keep = max(1, round(part * mixture.count))
    if keep == mixture.count:
        least = f"; {(keep - 1) / keep:.3g} would remove one" if keep > 1 else ""
        raise ValueError(f"experts={part:g} removes none of the {mixture.count} experts of {mixture.experts}{least}")
    scores = mixture.scores
    if not bool(scores.isfinite().all()):
        raise ValueError(
            f"the outputs of the experts of {mixture.experts} are not finite on data=; check the data and the model"
        )
    return keep_largest(scores, mixture.count - keep).nonzero()[:, 0].tolist()


# --- mixtures -------------------------------------------------------------------------------------------------------


def find_mixtures(model: nn.Module, skipped: dict[str, str]) -> list[Mixture]:
    """The mixtures of a model, by their experts and the routers beside them. Adds those that cannot be cut to `skipped`."""
    found: list[Mixture] = []
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            count = _experts_in(child)
            if not count:
                continue
            here = ".".join(part for part in (path, name) if part)
            routers = [n for n, other in parent.named_children() if other is not child and _is_router(other, count)]
            listed = isinstance(child, nn.ModuleList)
            grouped = next((a for m in parent.modules() for a in _GROUPED if (vars(m).get(a) or 0) > 1), None)
            if grouped:
                skipped[here] = f"its router chooses groups of experts ({grouped}), which have to stay equal"
            elif len(routers) == 1:
                found.append(Mixture(path, here, ".".join(part for part in (path, routers[0]) if part), count, listed))
            elif not listed:
                skipped[here] = f"{len(routers) or 'no'} modules beside it have a matrix with a row for each of {count} experts"
    return found


def _experts_in(module: nn.Module) -> int:
    """The number of experts that a module holds; 0 if it holds none."""
    if isinstance(module, nn.ModuleList):
        return len(module) if len(module) > 1 and len({type(m) for m in module}) == 1 else 0
    count = vars(module).get("num_experts")
    return (
        count
        if type(count) is int and any(p.ndim == 3 and len(p) == count for p in module._parameters.values() if p is not None)
        else 0
    )


def _is_router(module: nn.Module, count: int) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and len(weight) == count


# --- scores ---------------------------------------------------------------------------------------------------------


def _measure(model: nn.Module, mixtures: Iterable[Mixture], batches: Sequence[Any]) -> None:
    """Runs the data through the model and adds up what REAP needs of each expert."""
    valid: list[Tensor | None] = [None]
    handles: list[Any] = []
    try:
        for m in mixtures:
            experts, router = model.get_submodule(m.experts), model.get_submodule(m.router)
            if m.listed:
                seen = _RouterFirst(m, router)
                handles.append(model.get_submodule(m.path).register_forward_pre_hook(seen.begins))
                handles.append(router.register_forward_hook(seen.routed))
                handles += [expert.register_forward_hook(seen.expert(i)) for i, expert in enumerate(experts.children())]
            else:
                handles.append(experts.register_forward_pre_hook(_stacked(m, valid), with_kwargs=True))
        with eval_mode(model), torch.no_grad():
            for batch in track(batches, "experts"):
                args, kwargs, _ = split_batch(batch)
                valid[0] = valid_positions(batch)
                with on_batch(model, args, kwargs):
                    model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _stacked(mixture: Mixture, valid: Sequence[Tensor | None]) -> Callable[..., None]:
    """A hook for experts that are called with tokens, the experts of each token, and the gates of these."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) != 3 or any(t.ndim != 2 for t in given):
            return
        x, chosen, gates = given
        if chosen.is_floating_point() or chosen.shape != gates.shape or len(x) != len(chosen):
            return
        mask = valid[0]
        there = mask.flatten().to(x.device) if mask is not None and mask.numel() == len(x) else None
        for e in range(mixture.count):
            token, place = torch.where(chosen == e if there is None else (chosen == e) & there[:, None])
            if len(token):  # one expert for each row: its output is already multiplied with the gate
                out = module.forward(x[token], chosen[token, place][:, None], gates[token, place][:, None])
                mixture.add(e, out.float().norm(dim=-1))

    return hook


class _RouterFirst:
    """Hooks for a list of experts. Their router runs before them, and its softmax of an expert's input is the gate."""

    def __init__(self, mixture: Mixture, router: Any) -> None:
        self.mixture, self.router, self.ran = mixture, router, False

    def begins(self, *_: Any) -> None:
        self.ran = False

    def routed(self, *_: Any) -> None:
        self.ran = True

    def expert(self, number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            x, weight = args[0] if args else None, self.router.weight
            if not self.ran or not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape[-1] != weight.shape[1]:
                return
            rows, made = x.reshape(-1, x.shape[-1]), output.reshape(-1, output.shape[-1])
            gates = F.linear(rows, weight, getattr(self.router, "bias", None)).float().softmax(-1)[:, number]
            if len(rows) == len(made):
                self.mixture.add(number, gates * made.float().norm(dim=-1))

        return hook


# --- the cut --------------------------------------------------------------------------------------------------------


def _cuts(model: nn.Module, kept: Sequence[tuple[Mixture, list[int]]]) -> Cuts:
    cuts, tensors = Cuts(), dict(owned_tensors(model).values())
    for m, stay in kept:
        if m.listed:
            cuts.drop[m.experts] = [i for i in range(m.count) if i not in set(stay)]
            cuts.lengths[m.experts] = m.count
        for name, tensor in tensors.items():
            owner = name.rpartition(".")[0]
            carries = owner == m.router or (owner == m.experts and not m.listed)
            if carries and tensor.ndim and len(tensor) == m.count:
                cuts.tensors[name] = {0: stay}
                cuts.shapes[name] = tuple(tensor.shape)
    found = {(a.path, a.name): a for a in _numbers(model, kept)}
    cuts.attributes = list(found.values())
    return cuts


def _numbers(model: nn.Module, kept: Sequence[tuple[Mixture, list[int]]]) -> Iterator[Attribute]:
    """The numbers of experts, and of experts for each token, in the mixtures, in the modules around them and in configs."""
    for m, stay in kept:
        inside = model.get_submodule(m.path)
        for path, module in inside.named_modules(prefix=m.path):
            yield from _changed(path, module, m.count, len(stay))
    if len(sizes := {(m.count, len(stay)) for m, stay in kept}) == 1:  # what holds for all of them stands in configs too
        count, left = sizes.pop()
        paths = {m.path for m, _ in kept}
        for path, module in model.named_modules():
            if any(not path or p == path or p.startswith(f"{path}.") for p in paths):
                yield from _changed(path, module, count, left)
        for path, config in {id(value): (at, value) for at, value in held_objects_of(model)}.values():
            if not path.rpartition(".")[2].startswith("_"):
                yield from _changed(path, config, count, left)


def _changed(path: str, owner: Any, count: int, left: int) -> Iterator[Attribute]:
    for name, value in vars(owner).items():
        if type(value) is int and name in _COUNTS and value == count:
            yield Attribute(path, name, None, count, left)
        elif type(value) is int and name in _CHOSEN and value > left:
            yield Attribute(path, name, None, value, left)
