"""Activation sparsity: gates set the smallest inputs of a layer to zero, so that the weights they are multiplied with need not
be read.

A gate is a forward pre-hook. It does not change parameters, buffers and the model's `state_dict`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._dist import same_batches
from ._hints import hints
from ._layers import features_axis, input_size
from ._text import percent_hint
from ._tree import bare_name, nearest, nearest_glob
from .arguments import plain_arguments
from .blocks import repeated_blocks
from .display import Reported, Shown, Table
from .edit import Arguments, Step, forget_, forget_all_, record_
from .methods import METHODS, Gate, Measured, Probe, Seen, greedy_sparsities, mean, ratio, squares
from .progress import track
from .stats import NO_BATCH, as_it_was, check_evidence, on_batch, split_batch, warn_of_unused_input
from .targeting import Globs, globs_of

SPREADS = ("uniform", "greedy")
_NO_PRODUCTS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Bilinear,
    nn.LayerNorm,
    nn.RMSNorm,
)  # no product with features
_SHOWN = 12  # names shown in an error
_REPLAYED = 8  # spread="greedy" runs so many batches of the data again and again


@hints
def gate_(
    model: nn.Module,
    *,
    sparsity: float = 0.5,
    at: Globs = None,
    data: Iterable[Any] | None = None,
    method: Literal["threshold", "topk", "static"] = "threshold",
    spread: Literal["uniform", "greedy"] = "uniform",
) -> Gates:
    """Zeroes the smallest inputs of layers, a fraction `sparsity` of them, and returns the gates.

    Args:
        model: the model, which gets a hook for each gate.
        sparsity: the fraction of inputs that become zero; the printed result states it.
        at: globs over module names ("*.mlp.down_proj"). A glob matches layers that own a weight matrix or kernel, a plain name
            any module whose first input is a float tensor. By default: all such layers in the model's repeated blocks.
        data: an iterable of batches, as for `prune_`.
        method: "threshold" zeroes inputs below the magnitude under which this share of the calibration data lies (TEAL: Liu
            et al., 2024). "topk" zeroes all but the largest inputs of each token and needs no data. "static" zeroes always the
            same features, those with the smallest mean magnitude.
        spread: "uniform" gives every layer the same sparsity, "greedy" allocates by measured output error so that `sparsity`
            of all gated weights are skipped.
    """
    given, at = dict(locals()), globs_of("at", at)
    _check(model, sparsity, method, spread, data)
    with torch.no_grad(), as_it_was(model):  # reading a computed weight may change it (spectral_norm)
        gates = {
            name: Gate(name, method, float(sparsity), features_axis(module), input_size(module), _weights(module))
            for name, module in _layers(model, at).items()
        }
    made = gates
    if data is not None and (method != "topk" or spread == "greedy"):
        made = _calibrated(model, gates, data, float(sparsity), spread, named=bool(at))
    skipped = dict.fromkeys(gates.keys() - made.keys(), "saw no input while the data ran through")
    text = f"{method}, sparsity {sparsity:g}, spread {spread}"
    call = ("gate", text), plain_arguments(gate_, {**given, "at": at or None})
    record_(model, *call)
    return Gates(model, made, skipped, call)._attach()


@dataclass(repr=False)
class Gates(Shown, Reported):
    """The gates of a model. `print` shows a table, `measured` runs them on data, `undo_` removes them.

    `skipped` maps the layers that got no gate to the reason.
    """

    model: nn.Module
    gates: dict[str, Gate]
    skipped: dict[str, str] = field(default_factory=dict)
    _call: tuple[Step, Arguments] | None = None  # in the record of the model

    @classmethod
    def of(cls, model: nn.Module) -> Gates:
        """Returns the gates of a model, for instance of a copy of a gated model."""
        found = {name: gate for name, module in model.named_modules() if (gate := _gate_of(module))}
        if not found:
            raise ValueError(f"this {type(model).__name__} has no gates")
        return cls(model, found)

    @classmethod
    def load(cls, model: nn.Module, state: Mapping[str, Any]) -> Gates:
        """Attaches the gates of a `state_dict()`, without calibration."""
        known = {name for name, _ in model.named_modules(remove_duplicate=False)}
        names: dict[int, str] = {}
        for name, entry in state.items():
            if name not in known:
                raise ValueError(f"the gates name {name!r}, which the model does not have.{nearest(name, known)}")
            _check_entry(name, entry)
            module = model.get_submodule(name)
            if entry["features"] != (features := input_size(module)) and None not in (entry["features"], features):
                raise ValueError(f"{name!r} takes {features} features, but its gate was made for {entry['features']} features")
            _no_gate_yet(name, module)
            if (other := names.setdefault(id(module), name)) != name:
                raise ValueError(f"{other!r} and {name!r} are one layer, which has one gate")
        gates = {name: Gate(name=name, **dict(entry)) for name, entry in state.items()}
        return cls(model, copy.deepcopy(gates))._attach()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Plain numbers and masks, which `torch.load(weights_only=True)` can read and `Gates.load` attaches."""
        return {name: {k: v for k, v in asdict(gate).items() if k != "name"} for name, gate in self.gates.items()}

    def undo_(self, model: nn.Module | None = None) -> None:
        """Removes the gates and restores the model, even if their layers were moved to other places in it.

        `model` may be left out, as in the `undo_` of every result.
        """
        if model is not None and model is not self.model:
            raise ValueError("these gates belong to another model; sc.Gates.of(model) are those of a copy")
        own, there = set(map(id, self.gates.values())), False
        for module in self.model.modules():
            for key in [key for key, hook in module._forward_pre_hooks.items() if id(hook) in own]:
                there = True
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        if there and self._call is not None:
            forget_(self.model, *self._call)
        if not any(map(_gate_of, self.model.modules())):
            forget_all_(self.model, "gate")

    def measured(self, batch: Any) -> Measured:
        """Measures the gates on a batch, or on an iterable of batches: the zeros they reach, and the error of the output."""
        batches = [batch] if isinstance(batch, Tensor | Mapping | tuple) else batch
        check_evidence(frozenset(), batches, None)
        modules = {name: self.model.get_submodule(name) for name in self.gates}
        if gone := [name for name, module in modules.items() if _gate_of(module) is not self.gates[name]]:
            raise ValueError(f"the gate of {gone[0]!r} was removed, so it cannot be measured")
        probes = {name: Probe(gate) for name, gate in self.gates.items()}
        away, size, count = 0.0, 0.0, 0
        with torch.no_grad(), as_it_was(self.model):
            for one in track(batches, "measure gates"):
                count += 1
                args, kwargs, _ = split_batch(one)
                with _instead(modules, {}), on_batch(self.model, args, kwargs):
                    dense = self.model(*args, **kwargs)
                with _instead(modules, probes):
                    gated = self.model(*args, **kwargs)
                found = squares(gated, dense)
                away, size = away + found[0], size + found[1]
        if not count:
            raise ValueError("no batch was given to measure on")
        return Measured([probe.reached() for probe in probes.values()], ratio(away, size))

    def _attach(self) -> Gates:
        for name, gate in self.gates.items():
            self.model.get_submodule(name).register_forward_pre_hook(gate, with_kwargs=True)
        return self

    def metrics(self) -> dict[str, Any]:
        """Plain numbers in a flat dictionary: totals, and `sparsity/NAME` for each layer.

        `sparsity` is the requested one, `calibrated` that of the calibration data (None without data). Both are weighted by the
        number of weights.
        """
        gates = list(self.gates.values())
        known = all(gate.calibrated is not None for gate in gates)
        return {
            "gates": len(gates),
            "weights": sum(gate.weights for gate in gates),
            "sparsity": mean((gate.sparsity, gate.weights) for gate in gates),
            "calibrated": mean((gate.calibrated or 0.0, gate.weights) for gate in gates) if known else None,
            "skipped": len(self.skipped),
            **{f"sparsity/{gate.name}": gate.sparsity for gate in gates},
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything but the masks, as plain values that JSON can hold."""
        layers = {
            name: {key: value for key, value in asdict(gate).items() if key not in ("name", "mask")}
            for name, gate in self.gates.items()
        }
        totals = {key: value for key, value in self.metrics().items() if "/" not in key}
        return {**totals, "layers": layers, "skipped": dict(self.skipped)}

    def _table(self) -> Table:
        def share(value: float | None) -> str:
            return "-" if value is None else f"{value:.2%}"

        def row(gate: Gate) -> tuple[str, ...]:
            features = "?" if gate.features is None else str(gate.features)
            return gate.name, gate.method, features, gate.rule, share(gate.sparsity), share(gate.calibrated)

        whole = self.metrics()
        gated, every = whole["weights"], sum(p.numel() for p in self.model.parameters() if p.ndim > 1)
        held = f"these layers hold {gated:,} of the {every:,} weights in the model's matrices ({gated / max(every, 1):.1%})"
        if gated > every:  # compressed layers keep theirs in other forms
            held = f"these layers hold {gated:,} weights"
        methods = ", ".join(dict.fromkeys(gate.method for gate in self.gates.values()))
        return Table(
            ("layer", "method", "features", "stays", "asked", "calibrated"),
            [row(gate) for gate in self.gates.values()],
            [("in all, by weights", "", "", "", share(whole["sparsity"]), share(whole["calibrated"]))],
            right=range(2, 6),
            title=f"gates ({methods}) that zero {share(whole['sparsity'])} of the inputs, by weights",
            notes=[held, *(f"skipped: {name}, which {why}" for name, why in self.skipped.items())],
        )


# --- finding layers, checking arguments -----------------------------------------------------------------------------


def check_gate_values(sparsity: Any, method: str, spread: str) -> None:
    """Raises ValueError for arguments of `gate_` that fit no model."""
    if not isinstance(sparsity, Real) or isinstance(sparsity, bool) or not 0 <= float(sparsity) < 1:
        raise ValueError(
            f"sparsity={sparsity!r} must be a number from 0 to below 1: the share of input elements to zero"
            f"{percent_hint(sparsity)}"
        )
    for argument, given, known in (("method", method, METHODS), ("spread", spread, SPREADS)):
        if given not in known:
            raise ValueError(f"{argument}={given!r} must be one of {', '.join(map(repr, known))}.{nearest(str(given), known)}")


def _check(model: nn.Module, sparsity: float, method: str, spread: str, data: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    check_gate_values(sparsity, method, spread)
    if data is None and (method != "topk" or spread == "greedy"):
        why = f"method={method!r}" if method != "topk" else f"spread={spread!r}"
        raise ValueError(f"{why} is calibrated, so pass data= (an iterable of batches); method='topk' alone needs none")
    if data is not None:
        check_evidence(frozenset(), data, None)


def _check_entry(name: str, entry: Any) -> None:
    """Raises unless an entry of a state is one that `Gates.state_dict` made."""
    fields = set(Gate.__dataclass_fields__)
    if not isinstance(entry, Mapping) or set(entry) != fields - {"name"} or entry["method"] not in METHODS:
        raise ValueError(f"the entry of {name!r} is not one that Gates.state_dict() made")
    if not isinstance(entry["threshold"], Real) or (entry["mask"] is None) == (entry["method"] == "static"):
        raise ValueError(f"the entry of {name!r} has no threshold or mask that its method could use")
    if entry["mask"] is not None and entry["mask"].shape != (entry["features"],):
        raise ValueError(f"the mask of {name!r} is {tuple(entry['mask'].shape)}, for {entry['features']} features")


def _layers(model: nn.Module, globs: tuple[str, ...]) -> dict[str, nn.Module]:
    """The layers to gate, each under its first name."""
    named = list(model.named_modules(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, module in named:
        first.setdefault(id(module), name)
    matrices = [(name, module) for name, module in named if _has_matrix(module)]
    found: dict[str, nn.Module] = {}
    if not globs:
        inside = [
            name
            for block in repeated_blocks(model, (n for n, _ in matrices))
            if block.module is not model
            for name in block.names
        ]
        found = {first[id(module)]: module for name, module in matrices if name in inside or not inside}
    for glob in globs:
        plain = not set(glob) & set("*?[")
        known = named if plain else matrices
        hits = {first[id(m)]: m for n, m in known if n and (fnmatchcase(n, glob) or fnmatchcase(bare_name(n), glob))}
        if not hits:
            what = "module" if plain else "layer with a weight"
            raise ValueError(f"at={glob!r} matches no {what} of the model.{_hint(glob, [name for name, _ in matrices])}")
        found |= hits
    if not found:
        raise ValueError(f"{type(model).__name__} has no layer with a weight matrix or kernel, so there is nothing to gate")
    for name, module in found.items():
        _no_gate_yet(name, module)
    return found


def _hint(glob: str, names: Sequence[str]) -> str:
    """A hint with the nearest names, or else with globs for the layers there are (a star for the number of a block)."""
    known = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    some = ", ".join(map(repr, known[:_SHOWN])) + (", ..." if len(known) > _SHOWN else "")
    return nearest_glob(glob, names) or (some and f" Layers with a weight are {some}.")


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies its input by a weight of its own. A look-up table does not."""
    held = (module.parameters(recurse=False), module.buffers(recurse=False), getattr(module, "parametrizations", ()))
    if isinstance(module, _NO_PRODUCTS) or not any(True for _ in chain(*held)):  # a wrapper may show the weight of its child
        return False
    return isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim > 1


def _weights(module: nn.Module) -> int:
    """The number of weights that a layer multiplies its input with, without masks that are stored beside them."""
    if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim > 1:
        return weight.numel()
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() for tensor in tensors if tensor.ndim > 1) or 1


def _gate_of(module: nn.Module) -> Gate | None:
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Gate)), None)


def _no_gate_yet(name: str, module: nn.Module) -> None:
    if _gate_of(module):
        raise ValueError(f"{name!r} has a gate already; remove it first (sc.Gates.of(model).undo_())")


def _open(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """A gate that lets everything through."""


@contextmanager
def _instead(modules: Mapping[str, nn.Module], hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Runs these hooks instead of the gates, inside the context."""
    places = [
        (module._forward_pre_hooks, key, hook, hooks.get(name, _open))
        for name, module in modules.items()
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, Gate)
    ]
    try:
        for table, key, _, other in places:
            table[key] = other
        yield
    finally:
        for table, key, gate, _ in places:
            table[key] = gate


def _calibrated(
    model: nn.Module, gates: dict[str, Gate], data: Iterable[Any], sparsity: float, spread: str, *, named: bool
) -> dict[str, Gate]:
    """The gates, calibrated on the data. Layers that were not `named` and saw no input are left out. The model is unchanged."""
    seen = {name: Seen(name, gate.axis, gate.method) for name, gate in gates.items()}
    first: list[Any] = []
    batches = 0
    with torch.no_grad(), as_it_was(model):
        handles = [model.get_submodule(name).register_forward_pre_hook(seen[name], with_kwargs=True) for name in gates]
        try:
            for batch in same_batches(model, track(data, "calibrate gates"), "gates"):
                if not batches:
                    warn_of_unused_input(model, batch)
                args, kwargs, _ = split_batch(batch)
                with on_batch(model, args, kwargs, unchanged=(TypeError, ValueError)):  # those of the gates themselves
                    model(*args, **kwargs)
                batches += 1
                if spread == "greedy" and len(first) < _REPLAYED:
                    first.append(batch)
        finally:
            for handle in handles:
                handle.remove()
        if not batches:
            raise ValueError(NO_BATCH)
        if not named:  # some layers are read and never called, as nn.MultiheadAttention does with its projection
            gates = {name: gate for name, gate in gates.items() if seen[name].elements} or gates
        made = {name: seen[name].gate(gate, sparsity) for name, gate in gates.items()}
        if spread == "uniform":
            return made
        live = Gates(model, made)._attach()
        try:

            def put(name: str, level: float) -> None:
                vars(made[name]).update(vars(seen[name].gate(gates[name], level)))

            for name, level in greedy_sparsities(
                model, {name: gate.weights for name, gate in gates.items()}, put, first, sparsity
            ).items():
                put(name, level)
        finally:
            live.undo_()
    return made
