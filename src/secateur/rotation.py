"""`rotate_`: rotates the residual stream of a transformer so that its last channels matter least to the loss.

The layers of a transformer read the stream x after an RMS norm and add to it. A norm without a weight commutes with rotations,
so an orthogonal matrix R turns the model into one that computes the same function in other coordinates: the layers that write
to the stream return R'y, and those that read it get W R (SliceGPT: Ashkboos et al., 2024). `shrink` can then remove channels
of the turned stream, each of which is a combination of all old ones.

With S = E[n n'] for the normalised stream n, and M = E[h h'] for the gradients h of the loss with respect to n, removing a
channel u costs the loss about u'Mu u'Su / 2. The new channels are the eigenvectors of the sum over all norms of
(S^1/2 M S^1/2)^1/2, which is the geometric mean of S and M where these commute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._hints import hints
from ._layers import layout_of
from ._tree import as_module, slots
from .axes import Group, norm
from .curvature import Curvature, curvature
from .display import Reported, Shown, Table
from .edit import Inputs, all_or_nothing, owned_tensors, put_, record_, run, tensors_inside
from .reads import listen
from .stats import Loss, batches_of, check_evidence, split_batch
from .targeting import Target
from .trace import Trace, main_outputs, trace

_SAME = 1e-3  # the largest relative change of the output that rounding in float32 explains
_FLAT = 0.5  # the largest one at which one number may replace the weights of a norm
_FOR = (
    "rotate_ is for decoders whose layers read the stream after RMS norms (Llama, Mistral, Qwen), without adapters; use shrink "
    "without it for others. The model is unchanged."
)


@dataclass(repr=False)
class Rotation(Shown, Reported):
    """The result of `rotate_`: a tensor that names the stream, the number of channels, and the norms whose weights were moved.

    `flattened` names the norms that are followed by a weight which also writes to the stream (an output layer tied to the
    embedding), so that their own weights could only be replaced by one number. `change` is the resulting relative change of the
    output; 0 if there are none. `importance` are the eigenvalues, one for each channel, the largest first.
    """

    recipe: str
    stream: str
    channels: int
    norms: tuple[str, ...]
    flattened: tuple[str, ...]
    change: float
    importance: list[float]

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: channels, norms, the change of the output, and the share of the importance that half of them have."""
        total = sum(self.importance) or 1.0
        return {
            "channels": self.channels,
            "norms": len(self.norms),
            "flattened": len(self.flattened),
            "change": self.change,
            "first_half": sum(self.importance[: self.channels // 2]) / total,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        names = {"stream": self.stream, "flattened_norms": list(self.flattened), "importance": self.importance}
        return {"recipe": self.recipe, **self.metrics(), **names}

    def _table(self) -> Table:
        rows = [(self.stream, f"{self.channels:,}", f"{len(self.norms)}", f"{self.metrics()['first_half']:.1%}")]
        why = "one number replaces their weights, because a tied weight follows; relative change of the output"
        notes = [f"{', '.join(self.flattened)}: {why} {self.change:.2g}"] if self.flattened else []
        header = ("stream", "channels", "norms", "importance of the first half")
        return Table(header, rows, right=range(1, 4), title=self.recipe, notes=notes)

    def _repr_html_(self) -> str:
        return self._table().html(f"{len(self.flattened)} flattened")


@hints
def rotate_(model: nn.Module, *, data: Iterable[Any] | None = None, loss: Loss | None = None) -> Rotation:
    """Rotates the residual stream of the model, in place, so that removing its last channels costs the loss least.

    Call it before `shrink`. It is for models whose layers read the stream after RMS norms, as Llama, Mistral and Qwen do. It
    takes backward passes over `data`, as the criterion "obs" does. The weights of the norms move into the layers after them,
    and the model computes the same function, except where an output layer is tied to the embedding: then one number replaces
    the weights of the last norm, and the result reports how much this changes the output.

    Raises ValueError, with the model unchanged, if the stream cannot be rotated, or if that number would change the output by
    more than half of its norm.
    """
    model = as_module(model)
    check_evidence(frozenset({"curvature"}), data, loss, of="rotate_")
    batches = batches_of(data)
    inputs = split_batch(batches[0])[:2]
    stream = _stream(trace(model, *inputs))
    targets = {t.name: t for t in (Target(s, layout_of(s.module, tuple(s.tensor.shape), s.attribute)) for s in slots(model))}
    after = _norms(model, stream, [targets[name] for name in stream.read], inputs)
    measured = curvature(model, [targets[name] for name in stream.read], batches, kind="inputs", loss=loss)
    tensors = dict(owned_tensors(model).values())
    with all_or_nothing(model), torch.no_grad():
        before = _output(model, inputs)
        flattened = tuple(name for name in after if any(reader in stream.tied for reader in after[name]))
        pairs = [_fold(tensors, name, readers, name in flattened, measured) for name, readers in after.items()]
        flat, rounding = _output(model, inputs), max(_SAME, 8 * torch.finfo(tensors[stream.name].dtype).eps)
        moved = _difference(flat, before)
        if not flattened:
            _check(model, moved, rounding, "its norms do not multiply by their weights")
        elif moved > _FLAT:
            raise ValueError(
                f"the stream of {type(model).__name__} cannot be rotated: a layer tied to the embedding reads the output of "
                f"the norm of {flattened[0]}, so one number would have to replace its weight, which changes the output by "
                f"{moved:.2g} of its norm. Use shrink without rotate_, or give that layer a weight of its own first. The model "
                "is unchanged."
            )
        importance, basis = _basis(pairs)
        _turn(tensors, stream, basis)
        why = "its norms may subtract the mean (LayerNorm), or something else reads single channels"
        _check(model, _difference(_output(model, inputs), flat), rounding, why)
    result = Rotation("rotate by the loss", stream.name, stream.size, tuple(after), flattened, moved, importance.tolist())
    record_(model, ("rotate", result.recipe))
    return result


def _check(model: nn.Module, change: float, rounding: float, why: str) -> None:
    if change > rounding:
        raise ValueError(
            f"the stream of {type(model).__name__} cannot be rotated: that changes the output by {change:.2g}; {why}. The "
            "model is unchanged."
        )


# --- the stream -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stream:
    """The tensors along a stream: what is read from it, what writes to it (with the dim of the stream), the norms' weights."""

    name: str
    size: int
    read: dict[str, int]
    written: dict[str, int]
    scales: tuple[str, ...]

    @property
    def tied(self) -> set[str]:
        return self.read.keys() & self.written.keys()


def _stream(traced: Trace) -> _Stream:
    """The group of channels that the most norms scale."""
    kind = type(traced.model).__name__
    group = max(traced.prunable, key=lambda g: len(_scales(g)), default=None)
    if group is None or not (scales := _scales(group)):
        raise ValueError(f"{kind} has no residual stream that norms with weights read, so there is nothing to rotate; {_FOR}")
    places: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for m in group.members:
        if norm(traced.dims[m.tensor][m.dim]) is not group.atom:
            raise ValueError(
                f"the stream of {kind} cannot be rotated: {m.tensor} has it beside other channels on one axis; {_FOR}"
            )
        if m.tensor not in scales:
            places[m.role == "consume"][m.tensor] = m.dim
    return _Stream(group.members[0].tensor, group.size, places[True], places[False], scales)


def _scales(group: Group) -> tuple[str, ...]:
    """The tensors that multiply the channels one by one, without the biases of layers that write to the stream."""
    writers = {m.tensor.rpartition(".")[0] for m in group.members if m.role == "produce"}
    found = (m.tensor for m in group.members if m.role == "elementwise" and m.tensor.rpartition(".")[0] not in writers)
    return tuple(dict.fromkeys(found))


def _norms(model: nn.Module, stream: _Stream, readers: Sequence[Target], inputs: Inputs) -> dict[str, list[str]]:
    """The weight of each norm, and the weights of the layers that read the output of that norm."""
    kind, outputs, found = type(model).__name__, dict[int, tuple[Any, ...]](), dict[str, set[str]]()

    def gives(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            outputs[_memory(output)] = name, output  # held, so that no other tensor gets its memory

        return hook

    def takes(target: Target, x: Any) -> None:
        found.setdefault(target.name, set()).add(outputs.get(_memory(x), ("",))[0])

    def called(target: Target, _: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(module, nn.Embedding):
            takes(target, next(iter((*args, *kwargs.values())), None))

    hooks = [model.get_submodule(name.rpartition(".")[0]).register_forward_hook(gives(name)) for name in stream.scales]
    try:
        with listen(readers, called, lambda target, _, x: takes(target, x), before=True):
            run(model, *inputs)
    finally:
        for hook in hooks:
            hook.remove()
    after: dict[str, list[str]] = {name: [] for name in stream.scales}
    for name in stream.read:
        if len(places := found.get(name, set())) != 1 or "" in places:
            raise ValueError(
                f"the stream of {kind} cannot be rotated: {name} does not read the output of one of its norms; {_FOR}"
            )
        after[places.pop()].append(name)
    if idle := next((name for name, readers in after.items() if not readers), None):
        raise ValueError(
            f"the stream of {kind} cannot be rotated: no layer that was traced reads the output of the norm of {idle}; {_FOR}"
        )
    return after


def _memory(value: Any) -> int:
    """Where the memory of a tensor begins: a slice of a norm's output is that output too."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0


# --- the new coordinates --------------------------------------------------------------------------------------------


def _fold(
    tensors: dict[str, Tensor], scale: str, readers: Sequence[str], flatten: bool, measured: Curvature
) -> tuple[Tensor, Tensor]:
    """Moves the weight of a norm into the layers after it, and returns S and M of the norm's output without a weight.

    With `flatten`, the layers stay, and the weight becomes the number with the least cost for the loss.
    """
    if unseen := next((name for name in readers if name not in measured.G or name not in measured.H), None):
        raise ValueError(f"no token of data= reached {unseen}; pass more data")
    weight = tensors[scale].detach().double()
    if bool((weight == 0).any()):
        raise ValueError(
            f"{scale} has zeros, which remove channels of the stream for the layers after it; shrink the model first"
        )
    S = measured.H[readers[0]].to(weight) / torch.outer(weight, weight)
    M = torch.stack([measured.G[name].to(weight) for name in readers]).sum(0)
    if flatten:
        joint = M * S
        level = (joint @ weight).sum() / joint.sum() if float(joint.sum()) > 0 else weight.mean()
        put_(tensors[scale], torch.full_like(tensors[scale], float(level)))
        return S, M * level.square()
    put_(tensors[scale], torch.ones_like(tensors[scale]))
    for name in readers:
        put_(tensors[name], (tensors[name].detach().double() * weight).to(tensors[name]))
    return S, M * torch.outer(weight, weight)


def _basis(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    total = torch.stack([_root(root @ M @ root) for root, M in ((_root(S), M) for S, M in pairs)]).sum(0)
    values, vectors = torch.linalg.eigh(total)
    return values.flip(0), vectors.flip(1)


def _root(matrix: Tensor) -> Tensor:
    """The symmetric root of a matrix that is positive semidefinite up to rounding."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _turn(tensors: dict[str, Tensor], stream: _Stream, basis: Tensor) -> None:
    """Multiplies each tensor with the basis along its axis of the stream; a tied one once."""
    for name, dim in {**stream.read, **stream.written}.items():
        turned = tensors[name].detach().movedim(dim, -1).double() @ basis.to(tensors[name].device)
        put_(tensors[name], turned.movedim(-1, dim).to(tensors[name]).contiguous())


def _output(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    return [t.double() for t in tensors_inside(main_outputs(run(model, *inputs))) if t.is_floating_point()]


def _difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm of the wanted output."""
    pairs = [(float((a - b).square().sum()), float(b.square().sum())) for a, b in zip(found, wanted, strict=True)]
    return (sum(a for a, _ in pairs) / max(sum(b for _, b in pairs), 1e-300)) ** 0.5
