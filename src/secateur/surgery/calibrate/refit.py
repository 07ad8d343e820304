"""A repair from calibration data, without training: a least-squares fit of what reads a cut axis.

The fit goes through the small model in the order of execution. Each layer that lost inputs learns to give, from the inputs it
really gets, what the dense layer gives on the same data, and what the bypass that its output is added to has lost (channel
pruning: He et al., 2017). All batches advance together, one layer at a time, so the whole costs one forward pass of both
models; it holds the live activations of all batches.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...edit import Cuts
from ...stats import on_batch, split_batch
from .norms import checked

_ROWS = 1 << 22  # numbers in one block of input patches
_EACH, _LEAST = 128, 64  # rows to look at, for each column of a weight and in each batch
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


# ---------------------------------------------------------------- runs that wait


class _Over(BaseException):
    """Ends a run that is no longer needed."""


_here = threading.local()


class Run:
    """A forward pass in a thread of its own. It waits at each watched layer; only one run moves at a time."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self.model, (self.args, self.kwargs, _) = model, split_batch(batch)
        self.go, self.came = threading.Semaphore(0), threading.Semaphore(0)
        self.value: Any = None
        self.held: dict[str, Any] = {}  # what modules got that bypasses a layer, until the layer is fitted
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
        """Called by the watched layer, in the run's own thread."""
        self.value = value
        self.came.release()
        self.go.acquire()
        if self.over:
            raise _Over

    def resume(self) -> Any:
        """On to the next watched layer; what it has to show."""
        self.go.release()
        self.came.acquire()
        if self.failure is not None:
            raise self.failure
        return self.value

    def end(self) -> None:
        self.over = True
        self.go.release()
        self.thread.join()


def _shows(layer: Layer, pick: Callable[[tuple[Any, ...], Any], Any]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
        run = _here.run
        run.wait((layer.name, pick(args, output), run.held.pop(layer.bypass, None)))

    return hook


def _holds(name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        _here.run.held[name] = args[0]

    return hook


# ---------------------------------------------------------------- the fit


class Layer(NamedTuple):
    """A layer that lost inputs: its module in the small and the dense model, the outputs it keeps; `turned`: (in, out).

    `bypass`: the module whose input is what the layer's output is added to, if any.
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


def refit_(small: nn.Module, dense: nn.Module, cuts: Cuts, data: Iterable[Any], *, ridge: float = 1e-3) -> dict[str, str]:
    """Fit every linear layer and convolution that lost inputs to the dense layer's output on `data`, in place, with its bias.

    `ridge` holds the weights near what they are, in units of the mean variance of the inputs. A layer without a bias gets one.
    Returns the layers that lost inputs and could not be fitted, and why. When anything fails, `small` is as it was.
    """
    batches = checked(data)
    layers, skipped = _layers(small, dense, cuts)
    before = [
        (layer.small, layer.small.weight.data, layer.small.bias, layer.small.bias is not None and layer.small.bias.data)
        for layer in layers
    ]
    modes = {m: m.training for model in (small, dense) for m in model.modules()}
    told, draw = _Teller(len(layers)), torch.Generator().manual_seed(0)
    try:
        small.eval()
        dense.eval()
        order = [] if not layers else _order(small, layers, batches[0], skipped)
        with _waiting(small, dense, order, batches) as pairs:
            for layer in order:
                told(layer.name)
                sums, most = Sums(), rows_for(layer.small, len(pairs))
                for run, reference in pairs:
                    _add(sums, layer, run.resume(), reference.resume(), most, draw)
                _write(layer, *sums.solve(layer, ridge))
    except BaseException:
        for module, weight, bias, value in before:
            module.weight.data, module.bias = weight, bias
            if bias is not None:
                bias.data = value
        raise
    finally:
        for module, mode in modes.items():
            module.training = mode
    for layer, (_, _, bias, _) in zip(layers, before):
        if bias is None and layer.small.bias is not None:
            cuts.added[f"{layer.name}.bias".removeprefix(".")] = tuple(layer.small.bias.shape)
    return skipped


def _layers(small: nn.Module, dense: nn.Module, cuts: Cuts) -> tuple[list[Layer], dict[str, str]]:
    """The layers with a weight that lost inputs; for one of an unknown kind the run has to say which axis that is."""
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
            skipped[name] = f"{type(module).__name__} lost inputs; of convolutions, those in one group are fitted"
            continue
        kept = cut.get(1 if turned else 0)
        found.append(Layer(name, module, old[name], None if kept is None else torch.tensor(kept), turned))
    return found, skipped


def _order(small: nn.Module, layers: Sequence[Layer], batch: Any, skipped: dict[str, str]) -> list[Layer]:
    """The layers as the run comes to them. One that is used twice has no single target and is left out."""
    calls: list[Layer] = []

    def see(layer: Layer) -> Callable[..., None]:
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
            skipped[layer.name] = f"it runs {times[layer.name]} times in one pass of the model, so it has no single target"
        elif not times[layer.name] and not layer.turned:
            skipped[layer.name] = "the model did not run it on the first batch"
    return [layer._replace(bypass=bypasses.of(layer.name)) for layer in calls if times[layer.name] == 1]


class Bypasses(TorchDispatchMode):
    """Sees, in one run, which layers' outputs go nowhere but into a sum, and which module got the other summand before."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.got: dict[str, Any] = {}  # by module, what it got last
        self.then: dict[str, dict[str, Any]] = {}  # by layer, the same when it ran
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
        """The module that got, last of all before the layer ran, what the layer's output is added to."""
        uses = self.uses.get(name, [])
        if len(uses) != 1 or not isinstance(uses[0], Tensor) or uses[0].shape != self.outputs[name].shape:
            return None
        return next((module for module, x in reversed(self.then[name].items()) if x is uses[0]), None)


def _is_linear(module: Any, x: Any, output: Any) -> bool:
    """Whether a module with a matrix stored as (in, out) is a linear layer, by what it gives."""
    if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.shape[-1] != len(module.weight):
        return False
    plain = x @ module.weight + (0 if module.bias is None else module.bias)
    return plain.shape == output.shape and torch.allclose(plain, output, rtol=1e-3, atol=1e-3 * float(output.abs().max()))


@contextlib.contextmanager
def _waiting(
    small: nn.Module, dense: nn.Module, order: Sequence[Layer], batches: Sequence[Any]
) -> Iterator[list[tuple[Run, Run]]]:
    """For every batch a run of each model: the small one stops before each layer, the dense one after it."""
    modules = [dict(model.named_modules()) for model in (small, dense)]
    passed = [layer.bypass for layer in order if layer.bypass is not None]
    hooks = [names[name].register_forward_pre_hook(_holds(name)) for names in modules for name in passed]
    hooks += [layer.small.register_forward_pre_hook(_shows(layer, lambda args, _: args[0])) for layer in order]
    hooks += [layer.dense.register_forward_hook(_shows(layer, lambda _, output: output)) for layer in order]
    runs = [(Run(small, batch), Run(dense, batch)) for batch in batches] if order else []
    try:
        yield runs
    finally:
        for pair in runs:
            for run in pair:
                run.end()
        for hook in hooks:
            hook.remove()


class Sums:
    """What a regression needs of its data: sums over rows of inputs x, targets y, x x' and x y', in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        parts = [x.sum(0), x.T @ x] + ([] if y is None else [y.sum(0), x.T @ y])
        self.sums = [p.double() + (self.sums[i] if self.sums else 0) for i, p in enumerate(parts)]
        self.count += len(x)

    def moments(self, centred: bool = True) -> tuple[Tensor, Tensor]:
        """The mean of the inputs, and their second moments, around the mean or around zero."""
        mean, square = (part / self.count for part in self.sums[:2])
        return mean, square - torch.outer(mean, mean) if centred else square

    def solve(self, layer: Layer, ridge: float) -> tuple[Tensor, Tensor]:
        """Weights and bias nearest to the targets; the centred equations, so that the bias is free."""
        if not all(bool(part.isfinite().all()) for part in self.sums):
            raise ValueError(
                f"{layer.name}: its inputs or the dense layer's outputs are not finite on data=; look at both models"
            )
        x, gram = self.moments()
        y = self.sums[2] / self.count
        cross = self.sums[3] / self.count - torch.outer(x, y)
        now = layer.matrix().double()
        lift = ridge * float(gram.diagonal().mean())
        gram.diagonal().add_(lift if lift > 0 else 1.0)  # inputs that never vary: any positive number keeps the weights
        step = torch.cholesky_solve(cross - (gram @ now.T) + (lift if lift > 0 else 1.0) * now.T, torch.linalg.cholesky(gram)).T
        new = now + step
        return new, y - new @ x


def _add(sums: Sums, layer: Layer, mine: Any, theirs: Any, most: int, draw: torch.Generator) -> None:
    if mine is None or theirs is None or not mine[0] == theirs[0] == layer.name:
        raise RuntimeError(f"the runs of the small and the dense model do not come to {layer.name} in the same order")
    x, y, passed = mine[1], theirs[1], mine[2] is not None and theirs[2] is not None
    if passed:
        y = y + theirs[2]
    if layer.outputs is not None:
        y = y.index_select(1 - layer.small.weight.dim() if layer.conv else -1, layer.outputs.to(y.device))
    if passed:
        y = y - mine[2]
    for rows, goal in samples(layer.small, x, y, most, draw):
        sums.add(rows, goal)


def rows_for(module: Any, batches: int) -> int:
    """How many rows of each batch a fit of this layer looks at: neighbouring places of an image say much the same."""
    columns = module.weight[0].numel() if isinstance(module, CONVS) else max(module.weight.shape)
    return max(_LEAST, _EACH * columns // batches + 1)


def samples(
    module: Any, x: Tensor, y: Tensor | None, most: int, draw: torch.Generator
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Blocks of rows: what the layer multiplies with its weight, and the outputs `y` there; at most so many, drawn evenly."""
    if isinstance(module, CONVS):
        rank = module.weight.dim() - 2
        single = x.dim() == rank + 1
        places = patches(module, x[None] if single else x)
        y = None if y is None else (y[None] if single else y).movedim(1, -1)
    else:
        places, y, rank = x.reshape(-1, x.shape[-1]), None if y is None else y.reshape(-1, y.shape[-1]), 0
    shape = places.shape[: 1 + rank]
    total = math.prod(shape)
    picked = torch.arange(total) if total <= most else torch.randint(total, (most,), generator=draw)
    wide = math.prod(places.shape[1 + rank :])
    for part in picked.split(max(1, _ROWS // max(1, wide))) if total else ():
        at = torch.unravel_index(part.to(x.device), shape)
        rows, goal = places[at].flatten(1), None if y is None else y[at]
        yield tuple(t if t is None or t.dtype in (torch.float32, torch.float64) else t.float() for t in (rows, goal))  # type: ignore[misc]


def patches(conv: Any, x: Tensor) -> Tensor:
    """What a convolution multiplies with its weight, as a view: (n, places of the output, channel, kernel)."""
    rank = x.dim() - 2
    x = F.pad(x, conv._reversed_padding_repeated_twice, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    for i in range(rank):
        x = x.unfold(2 + i, conv.dilation[i] * (conv.kernel_size[i] - 1) + 1, conv.stride[i])[..., :: conv.dilation[i]]
    return x.movedim(1, 1 + rank)


def _write(layer: Layer, weight: Tensor, bias: Tensor) -> None:
    module = layer.small
    made = weight.T if layer.turned else weight.reshape(module.weight.shape)
    module.weight.data = made.to(module.weight).contiguous()  # a new tensor: the old one is kept until all went well
    if module.bias is None:
        module.bias = nn.Parameter(bias.to(module.weight), requires_grad=module.weight.requires_grad)
    else:
        module.bias.data = bias.to(module.bias)


class _Teller:
    """One plain line on stderr every few seconds, for work that takes that long."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.begin = self.last = time.monotonic()

    def __call__(self, name: str) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.last > 5:
            print(
                f"secateur: refit: {name}, {self.done} of {self.total} ({now - self.begin:.0f} s)", file=sys.stderr, flush=True
            )
            self.last = now
