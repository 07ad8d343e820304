"""Refit: a repair from calibration data without training, by a least-squares fit of the layers that read a cut axis.

The fit follows the order of execution. Each layer that lost inputs is fitted, from the inputs it gets in the small model, to
the output of the dense layer on the same data, plus what the bypass that its output is added to has lost (channel pruning: He
et al., 2017). All batches advance together, layer by layer, so the fit costs one forward pass of both models. It holds the
live activations of all batches. `stream` is not used here: it hands out blocks, and a block would have to run once more for
each of its layers that is fitted (measured on a small Llama with 43 such layers: 0.08 s paused, 0.44 s block by block).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...edit import Cuts, eval_mode
from ...progress import track
from ...stats import on_batch, split_batch
from .norms import list_batches
from .regression import CONVS, Regression, rows_for, samples

# ---------------------------------------------------------------- paused runs


class _Over(BaseException):
    """Ends a paused run that is no longer needed."""


_here = threading.local()


class PausedRun:
    """A forward pass in its own thread. It pauses at each watched layer; only one run is active at a time."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model, (self.args, self.kwargs, _) = model, split_batch(batch)
        self.go, self.came = threading.Semaphore(0), threading.Semaphore(0)
        self.value: Any = None
        self.held: dict[str, Any] = {}  # inputs of modules that bypass a layer, until the layer is fitted
        self.failure: BaseException | None = None
        self.over = False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        _here.run = self
        self.go.acquire()
        try:
            with torch.no_grad():
                if not self.over:
                    self.model(*self.args, **self.kwargs)
        except _Over:
            pass
        except BaseException as failure:
            self.failure = failure
        self.value = None
        self.came.release()

    def wait(self, value: Any) -> None:
        """Pauses the run and shows `value`. Called by the watched layer, in the run's own thread."""
        self.value = value
        self.came.release()
        self.go.acquire()
        if self.over:
            raise _Over

    def resume(self) -> Any:
        """Continues to the next watched layer and returns what it shows."""
        self.go.release()
        self.came.acquire()
        if self.failure is not None:
            raise self.failure
        return self.value

    def end(self) -> None:
        self.over = True
        self.go.release()
        self.thread.join()


def _shows(layer: FitLayer, pick: Callable[[tuple[Any, ...], Any], Any]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        run = _here.run
        run.wait((layer.name, pick(args, output), run.held.pop(layer.bypass, None)))

    return hook


def _holds(name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        _here.run.held[name] = args[0]

    return hook


# ---------------------------------------------------------------- the fit


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
    draw = torch.Generator().manual_seed(0)
    try:
        with eval_mode(small, dense):
            order = [] if not layers else _order(small, layers, batches[0], skipped)
            with _waiting(small, dense, order, batches) as pairs:
                for layer in track(order, "refit", lambda layer: layer.name):
                    regression, most = Regression(), rows_for(layer.small, len(pairs))
                    for run, reference in pairs:
                        _add(regression, layer, run.resume(), reference.resume(), most, draw)
                    if not regression.count:
                        skipped[layer.name] = "no row of data= reached it"
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


def _order(small: nn.Module, layers: Sequence[FitLayer], batch: Any, skipped: dict[str, str]) -> list[FitLayer]:
    """The layers in the order of execution, without those that run more than once."""
    calls: list[FitLayer] = []

    def see(layer: FitLayer) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not layer.turned or _is_linear(layer.small, args[0] if args else None, output):
                calls.append(layer)

        return hook

    hooks = [layer.small.register_forward_hook(see(layer)) for layer in layers]
    try:
        args, kwargs, _ = split_batch(batch)
        with Bypasses(small, layers) as bypasses, torch.no_grad(), on_batch(small, args, kwargs):
            small(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(layer.name for layer in calls)
    for layer in layers:
        if times[layer.name] > 1:
            skipped[layer.name] = f"it runs {times[layer.name]} times in one forward pass, so it has no single target"
        elif not times[layer.name] and not layer.turned:
            skipped[layer.name] = "the model did not run it on the first batch"
    return [layer._replace(bypass=bypasses.of(layer.name)) for layer in calls if times[layer.name] == 1]


class Bypasses(TorchDispatchMode):
    """Finds layers whose output is used only in a sum, and the module that got the other summand before. Watches one run."""

    def __init__(self, model: nn.Module, layers: Sequence[FitLayer]) -> None:
        super().__init__()
        self.got: dict[str, Any] = {}  # module -> its last input
        self.then: dict[str, dict[str, Any]] = {}  # layer -> a copy of `got` when it ran
        self.outputs: dict[str, Any] = {}
        self.uses: dict[str, list[Any]] = {}
        self.hooks = [m.register_forward_pre_hook(self._before(name)) for name, m in model.named_modules() if name]
        self.hooks += [layer.small.register_forward_hook(self._after(layer.name)) for layer in layers]

    def _before(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
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
        """The last module before the layer that got the tensor to which the layer's output is added."""
        uses = self.uses.get(name, [])
        if len(uses) != 1 or not isinstance(uses[0], Tensor) or uses[0].shape != self.outputs[name].shape:
            return None
        return next((module for module, x in reversed(self.then[name].items()) if x is uses[0]), None)


def _is_linear(module: Any, x: Any, output: Any) -> bool:
    """True if a module computes x @ weight + bias, which its output shows."""
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape[-1] != len(module.weight):
        return False
    plain = x @ module.weight + (0 if module.bias is None else module.bias)
    return plain.shape == output.shape and torch.allclose(plain, output, rtol=1e-3, atol=1e-3 * float(output.abs().max()))


@contextlib.contextmanager
def _waiting(
    small: nn.Module, dense: nn.Module, order: Sequence[FitLayer], batches: Sequence[Any]
) -> Iterator[list[tuple[PausedRun, PausedRun]]]:
    """A paused run of each model for every batch. The small model pauses before each layer, the dense one after it."""
    modules = [dict(model.named_modules()) for model in (small, dense)]
    passed = [layer.bypass for layer in order if layer.bypass is not None]
    hooks = [names[name].register_forward_pre_hook(_holds(name)) for names in modules for name in passed]
    hooks += [layer.small.register_forward_pre_hook(_shows(layer, lambda args, _: args[0])) for layer in order]
    hooks += [layer.dense.register_forward_hook(_shows(layer, lambda _, output: output)) for layer in order]
    runs = [(PausedRun(small, batch), PausedRun(dense, batch)) for batch in batches] if order else []
    try:
        yield runs
    finally:
        for pair in runs:
            for run in pair:
                run.end()
        for hook in hooks:
            hook.remove()


def _add(regression: Regression, layer: FitLayer, mine: Any, theirs: Any, most: int, draw: torch.Generator) -> None:
    if mine is None or theirs is None or not mine[0] == theirs[0] == layer.name:
        raise RuntimeError(f"the small and the dense model do not run {layer.name} in the same order")
    x, y, passed = mine[1], theirs[1], mine[2] is not None and theirs[2] is not None
    if passed:
        y = y + theirs[2]
    if layer.outputs is not None:
        y = y.index_select(1 - layer.small.weight.dim() if layer.conv else -1, layer.outputs.to(y.device))
    if passed:
        y = y - mine[2]
    for rows, goal in samples(layer.small, x, y, most, draw):
        regression.add(rows, goal)


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
