"""Refit: a repair from calibration data without training, by a least-squares fit of the layers that read a cut axis.

The fit follows the order of execution. Each layer that lost inputs is fitted, from the inputs it gets in the small model, to
the output of the dense layer on the same data, plus what the bypass that its output is added to has lost (channel pruning: He
et al., 2017). `stream` gives the inputs of one layer after the other in both models, so that each layer reads what the layers
fitted before it return.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..._arguments import tensors_of
from ...edit import Cuts, eval_mode
from ...progress import Progress
from ...stats import on_batch, split_batch, valid_positions
from ...stream import Replay, stream
from .norms import list_batches
from .regression import CONVS, Regression, rows_for, samples


class FitLayer(NamedTuple):
    """A layer that lost inputs: its module in the small and in the dense model, and the outputs that it keeps.

    `turned`: its weight is stored as (inputs, outputs). `bypass`: the module that gets the tensor to which the layer's output
    is added, if any.
    """

    name: str
    small: Any
    dense: Any
    outputs: Tensor | None
    turned: bool
    bypass: str | None = None

    @property
    def conv(self) -> bool:
        return isinstance(self.small, CONVS)

    def matrix(self) -> Tensor:
        """The weight as (outputs, inputs x kernel)."""
        weight = self.small.weight.detach()
        return weight.T if self.turned else weight.flatten(1)


def refit_(
    small: nn.Module, dense: nn.Module, cuts: Cuts, data: Iterable[Any], *, ridge: float = 1e-3, bias: bool = True
) -> dict[str, str]:
    """Fit every linear layer and convolution that lost inputs to the dense layer's output on `data`, in place.

    `ridge` pulls the weights towards their present values, in units of the mean variance of the inputs. With `bias`, a layer
    without a bias gets one, which is added to `cuts`. Returns the layers that lost inputs and could not be fitted, with the
    reason. When anything fails, `small` is as it was.
    """
    batches = list_batches(data)
    layers, skipped = _layers(small, dense, cuts)
    before = [
        (layer.small, layer.small.weight.data, layer.small.bias, layer.small.bias is not None and layer.small.bias.data)
        for layer in layers
    ]
    try:
        with eval_mode(small, dense), torch.no_grad():
            order = {} if not layers else _order(small, layers, batches[0], skipped)
            for layer, regression in _regressions(small, dense, order, batches):
                if isinstance(regression, str):
                    skipped[layer.name] = regression
                    continue
                if not regression.finite:
                    raise ValueError(
                        f"{layer.name}: its inputs or the dense layer's outputs are not finite on data=; check both models"
                    )
                _write(layer, *regression.solve(layer.matrix().double(), ridge, bias or layer.small.bias is not None))
    except BaseException:
        for module, weight, own, value in before:
            module.weight.data, module.bias = weight, own
            if own is not None:
                own.data = value
        raise
    for layer, (_, _, own, _) in zip(layers, before):
        if own is None and layer.small.bias is not None:
            cuts.added[f"{layer.name}.bias".removeprefix(".")] = tuple(layer.small.bias.shape)
    return skipped


def _layers(small: nn.Module, dense: nn.Module, cuts: Cuts) -> tuple[list[FitLayer], dict[str, str]]:
    """The layers whose weight lost inputs. Matrices of unknown layer types are taken as (inputs, outputs); a run checks it."""
    old, found, skipped = dict(dense.named_modules()), [], dict[str, str]()
    for name, module in small.named_modules():
        cut = cuts.tensors.get(f"{name}.weight".removeprefix("."), {})
        weight = getattr(module, "weight", None)
        known = isinstance(module, nn.Linear) or (isinstance(module, CONVS) and module.groups == 1)
        turned = not known and isinstance(weight, nn.Parameter) and weight.dim() == 2 and hasattr(module, "bias")
        other = isinstance(module, nn.modules.conv._ConvNd) and not known
        if (0 if turned or (other and module.transposed) else 1) not in cut or not (known or turned or other):
            continue
        if other:
            skipped[name] = f"{type(module).__name__} lost inputs; of convolutions, only plain ones with groups=1 are fitted"
            continue
        kept = cut.get(1 if turned else 0)
        found.append(FitLayer(name, module, old[name], None if kept is None else torch.tensor(kept), turned))
    return found, skipped


def _order(small: nn.Module, layers: Sequence[FitLayer], batch: Any, skipped: dict[str, str]) -> dict[str, FitLayer | None]:
    """The layers that run once, and the modules that bypass them (None), by name and in the order of execution."""
    linear: set[str] = set()

    def see(layer: FitLayer) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not layer.turned or _is_linear(layer.small, args[0] if args else None, output):
                linear.add(layer.name)

        return hook

    hooks = [layer.small.register_forward_hook(see(layer)) for layer in layers]
    try:
        args, kwargs, _ = split_batch(batch)
        with Bypasses(small, layers) as bypasses, on_batch(small, args, kwargs):
            small(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        times = bypasses.times[layer.name]
        if times > 1:
            skipped[layer.name] = f"it runs {times} times in one forward pass, so it has no single target"
        elif not times and not layer.turned:
            skipped[layer.name] = "the model did not call it on the first batch; it may use the weight of the layer directly"
    once = [layer for layer in layers if bypasses.times[layer.name] == 1 and layer.name in linear]
    found = {layer.name: layer._replace(bypass=bypasses.of(layer.name)) for layer in once}
    used = {*found, *(layer.bypass for layer in found.values())}
    return {name: found.get(name) for name in bypasses.times if name in used}


class Bypasses(TorchDispatchMode):
    """Finds layers whose output is used only in a sum, and the module that got the other summand before. Watches one run."""

    def __init__(self, model: nn.Module, layers: Sequence[FitLayer]) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()  # calls of each module, in the order of the first
        self.got: dict[str, Any] = {}  # module -> its last input
        self.then: dict[str, dict[str, Any]] = {}  # layer -> a copy of `got` when it ran
        self.outputs: dict[str, Any] = {}
        self.uses: dict[str, list[Any]] = {}
        self.hooks = [m.register_forward_pre_hook(self._before(name)) for name, m in model.named_modules()]
        self.hooks += [layer.small.register_forward_hook(self._after(layer.name)) for layer in layers]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.times[name] += 1
            if name and args and isinstance(args[0], Tensor):
                self.got.pop(name, None)
                self.got[name] = args[0]

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.outputs[name], self.then[name] = output, dict(self.got)

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        summed = func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and not kwargs
        for name, output in self.outputs.items():
            if any(a is output for a in args):
                self.uses.setdefault(name, []).append(next((a for a in args if a is not output), None) if summed else None)
        return func(*args, **(kwargs or {}))

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        for hook in self.hooks:
            hook.remove()

    def of(self, name: str) -> str | None:
        """The last module before the layer that got the tensor to which the layer's output is added, of those that run once."""
        uses = self.uses.get(name, [])
        if len(uses) != 1 or not isinstance(uses[0], Tensor) or uses[0].shape != self.outputs[name].shape:
            return None
        found = (module for module, x in reversed(self.then[name].items()) if x is uses[0] and self.times[module] == 1)
        return next(found, None)


def _is_linear(module: Any, x: Any, output: Any) -> bool:
    """True if a module computes x @ weight + bias, which its output shows."""
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape[-1] != len(module.weight):
        return False
    plain = x @ module.weight + (0 if module.bias is None else module.bias)
    return plain.shape == output.shape and torch.allclose(plain, output, rtol=1e-3, atol=1e-3 * float(output.abs().max()))


def _regressions(
    small: nn.Module, dense: nn.Module, order: Mapping[str, FitLayer | None], batches: Sequence[Any]
) -> Iterator[tuple[FitLayer, Regression | str]]:
    """The regression of each layer, of the dense layer's output on its inputs in the small model; or why there is none."""
    layers = [layer for layer in order.values() if layer is not None]
    bypasses = {layer.bypass for layer in layers}
    held: dict[str | None, list[tuple[Tensor, Tensor]]] = {}  # inputs of bypassing modules, until the layer is fitted
    runs = [stream(model, [model.get_submodule(name) for name in order], batches) for model in (small, dense)]
    valid, draw = [valid_positions(batch) for batch in batches], torch.Generator().manual_seed(0)
    with contextlib.closing(runs[0]), contextlib.closing(runs[1]), Progress("refit", len(layers)) as progress:
        for (name, layer), mine, theirs in zip(order.items(), *runs, strict=True):
            if name in bypasses:
                held[name] = list(zip(_inputs(mine), _inputs(theirs)))
            if layer is None:
                continue
            progress(layer.name)
            bypass = held.pop(layer.bypass, None) or [None] * len(batches)
            yield layer, _regression(layer, mine, theirs, bypass, valid, draw)


def _regression(
    layer: FitLayer,
    mine: Replay,
    theirs: Replay,
    bypass: Sequence[tuple[Tensor, Tensor] | None],
    valid: Sequence[Tensor | None],
    draw: torch.Generator,
) -> Regression | str:
    if not len(mine.calls) == len(theirs.calls) == len(bypass):
        return "it does not run once on every batch of data="
    regression, most = Regression(), rows_for(layer.small, len(bypass))
    for x, y, pair, there in zip(_inputs(mine), theirs.run(), bypass, valid, strict=True):
        if x.shape[:1] != y.shape[:1] if layer.conv else x.shape[:-1] != y.shape[:-1]:
            return "it runs on other rows of data= than the layer of the dense model"
        for rows, goal in samples(layer.small, x, _goal(layer, y, pair), most, draw, there):
            regression.add(rows, goal)
    return regression if regression.count else "no row of data= reached it"


def _goal(layer: FitLayer, y: Tensor, bypass: tuple[Tensor, Tensor] | None) -> Tensor:
    """The target of the fit: the output of the dense layer, plus the change of the tensor that it is added to."""
    if bypass is not None:
        y = y + bypass[1]
    if layer.outputs is not None:
        y = y.index_select(1 - layer.small.weight.dim() if layer.conv else -1, layer.outputs.to(y.device))
    return y if bypass is None else y - bypass[0]


def _inputs(replay: Replay) -> list[Tensor]:
    """The first tensor of each call."""
    return [tensors_of(call)[0] for call in replay.calls]


def _write(layer: FitLayer, weight: Tensor, bias: Tensor | None) -> None:
    module = layer.small
    made = weight.T if layer.turned else weight.reshape(module.weight.shape)
    module.weight.data = made.to(module.weight).contiguous()  # a new tensor: the old one is needed if a later layer fails
    if bias is None:
        return
    if module.bias is None:
        module.bias = nn.Parameter(bias.to(module.weight), requires_grad=module.weight.requires_grad)
    else:
        module.bias.data = bias.to(module.bias)
