"""One run of a module, operator by operator: skips those that need not be computed again, and keeps what later ones read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .._arguments import fresh, replaced, tensors_of
from .._transfers import to_device, to_host
from ..products import matmul, rough_matmul

_SMALL = 1 << 18  # integer tensors up to so many bytes are always kept: Python code may read them (`tolist` is no operator)
_LARGE = 3  # on a device, up to so many times the size of the largest argument are kept
OUTSIDE = -1  # the memory of parameters, buffers and constants
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Made(NamedTuple):
    """A tensor: the number of its memory, and how it lies in it. Memory is numbered in the order in which it appears."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device


class Read(NamedTuple):
    """A weight that is about to be read: before operator `at`, by an input `x` at version `version`.

    `groups` is the part of its rows, or None for a call of its layer. `depends` has a bit for each target that x depends on.
    """

    name: str
    at: int
    x: Made | None
    version: int
    depends: int
    groups: tuple[int, int] | None


class Sum(NamedTuple):
    """An elementwise sum of two tensors, which is operator `at`, and what the two depend on."""

    at: int
    one: Made
    other: Made
    depends: tuple[int, int]
    result: Made | None


@dataclass
class Tape:
    """The operators of one run of a module."""

    functions: list[Any] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)  # the memory that each operator reads
    last_use: dict[int, float] = field(default_factory=dict)  # memory -> the last operator that reads it
    born: dict[int, int] = field(default_factory=dict)  # memory -> the operator that returned it first; -1 for arguments
    written: dict[int, list[int]] = field(default_factory=dict)  # memory -> the operators that write to it
    reads: list[Read] = field(default_factory=list)
    returned: dict[str, list[Made]] = field(default_factory=dict)  # target -> the outputs of its layer
    sums: list[Sum] = field(default_factory=list)
    where: dict[Made, tuple[int, int]] = field(
        default_factory=dict
    )  # tensor -> the operator (-1: none) and place of its output
    sizes: dict[int, int] = field(default_factory=dict)  # memory -> bytes
    decides: float = float("inf")  # the first operator after which other data may lead to other operators

    def best_start(self, first: int) -> int:
        """The operator from which to go on to operator `first`: the one at which least memory is needed.

        Only operators that take little time are executed again for that, such as the norm in front of a layer. Its input, the
        residual stream, is needed after the layer as well, so that its output need not be kept beside it.
        """
        best, least = first, self._needed(first)
        for at in range(first - 1, -1, -1):
            if not _takes_little_time(self.functions[at]):
                break
            if (needed := self._needed(at)) < least:
                best, least = at, needed
        return best

    def _needed(self, at: int) -> int:
        """The bytes that operators from `at` on read and earlier ones returned."""
        return sum(size for m, size in self.sizes.items() if self.born.get(m, at) < at <= self.last_use.get(m, -1))


class Enough(BaseException):
    """Ends a run: what was wanted has been seen."""


class Again(BaseException):
    """Ends a run that cannot be continued from where it was saved."""


@dataclass
class _Op:
    function: Any
    made: Any  # its output, with a `Made` in place of each tensor
    repeat: bool  # it returns a view of a parameter or constant, or reshapes its input in place, so it is executed every time


@dataclass
class State:
    """One call of a module: its arguments, the operators that were executed, and where to go on.

    Operators before `at` need not be computed, since `kept` has the memory that later ones read.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tape: Tape | None
    at: int = 0
    script: list[_Op] = field(default_factory=list)
    kept: dict[int, UntypedStorage | None] = field(default_factory=dict)  # None: the memory of an argument
    small: dict[int, UntypedStorage] = field(default_factory=dict)
    most: dict[torch.device, int] = field(default_factory=dict)  # the size of the largest memory on each device
    made: list[Made | None] = field(default_factory=list)  # the tensors among the arguments
    copies: bool = False  # the module writes to its arguments
    bytes: int = 0  # the size of the largest argument

    def reset(self) -> None:
        self.at, self.script, self.kept, self.small = 0, [], {}, {}


class Run(TorchDispatchMode):
    """Follows the operators of one run. `same`: so far they are those of the tape.

    `save_at`: the operator before which the run is saved; the memory needed then is held until then. With a
    `device`, the run is on that device, and what lies between runs is on the host; what is much larger than the arguments is
    not kept then, but computed again. `rough` lets products be rounded (see `rough_matmul`).
    """

    supports_higher_order_operators = True

    def __init__(
        self, state: State, save_at: int | None = None, device: torch.device | None = None, rough: bool = False
    ) -> None:
        super().__init__()
        self._products = _ROUGH if rough else _PRODUCTS
        self.state, self.tape, self.device = state, state.tape, device
        self.same, self.count = state.tape is not None, 0
        self.save_at = float("inf") if save_at is None else save_at
        self.picked: tuple[int, Tensor] | None = None  # the rows that were picked last, and out of how many
        self._aside = False
        self.numbers: dict[int, int] = {}  # storage -> number
        self._references: list[StorageWeakRef] = []  # while there is one, no other storage gets the same address
        self._next = 0
        self._held: dict[int, UntypedStorage] = {}
        self._here: dict[int, UntypedStorage] = {}  # what was kept, on the device of this run
        self._scratch: dict[torch.device, UntypedStorage] = {}  # stands for memory that was not kept
        self._unknown: set[int] = set()
        self._saved: tuple[int, dict[int, UntypedStorage]] | None = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operators inside are not part of the run."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def save(self) -> None:
        """Makes the next run of this call go on from here, if this is the operator to save at."""
        if self.tape is None or not self.same or self.count != self.save_at:
            return
        kept = {n: s for n, s in self._held.items() if self.tape.last_use.get(n, -1) >= self.count}
        if self.device is not None and sum(s.nbytes() for s in kept.values()) > _LARGE * self.state.bytes:
            return
        self._saved = self.count, kept

    def tensor(self, operator: int, place: int) -> Tensor | None:
        """The output of an operator that is behind (or, for -1, an argument), if its memory is held."""
        made = self.state.made[place] if operator < 0 else list(_mades(self.state.script[operator].made))[place]
        storage = None if made is None else self._held.get(made.memory)
        return None if made is None or storage is None else _on(storage, made)

    def has(self, tree: Any) -> bool:
        """Whether all tensors of a tree belong to this run: other runs of the module do not write to them."""
        return all(is_plain(tensor) and tensor.untyped_storage()._cdata in self.numbers for tensor in tensors_of(tree))

    def arguments(self) -> Call:
        """The arguments of the call. Tensors that are not needed any more are replaced by others of the same shape."""
        state = self.state
        given = tensors_of((state.args, state.kwargs))
        if not state.at:
            taken: list[Any] = self._taken(given)
            state.made = [self.take(tensor) if is_plain(tensor) else None for tensor in taken]
            state.bytes = max((t.untyped_storage().nbytes() for t in taken if is_plain(t)), default=0)
        else:
            for tensor, made in zip(given, state.made, strict=True):
                if made is not None and made.memory in state.kept and state.kept[made.memory] is None:
                    self._bring(made.memory, self._taken([tensor])[0].untyped_storage())
            taken = [tensor if made is None else self._rebuilt(made) for tensor, made in zip(given, state.made, strict=True)]
            self._next = 1 + max([made.memory for made in state.made if made is not None], default=-1)
        args, kwargs = fresh(replaced((state.args, state.kwargs), dict(enumerate(taken)), [0]))
        return args, kwargs

    def _taken(self, given: Sequence[Tensor]) -> list[Tensor]:
        """The tensors on the device of the run; copies where the module writes to its arguments."""
        here: dict[int, Tensor] = {}
        for tensor in given:
            if id(tensor) not in here:
                moved = tensor if self.device is None else to_device(tensor, self.device)
                here[id(tensor)] = moved.detach().clone() if self.state.copies and moved is tensor else moved
        return [here[id(tensor)] for tensor in given]

    def commit(self) -> None:
        """Keeps what was saved, after a run that ended well."""
        if self._saved is not None:
            at, kept = self._saved
            arguments = {made.memory for made in self.state.made if made is not None}
            if self.device is None:
                self.state.kept = dict(kept)
            else:
                unchanged = set() if self.state.copies else arguments
                self.state.kept = {n: None if n in unchanged else on_host(s) for n, s in kept.items()}
            self.state.at = at
        del self.state.script[self.state.at :]

    # --- operators ---

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside:
            return func(*args, **kwargs)
        self.save()
        index, self.count = self.count, self.count + 1
        if index < self.state.at:
            return self._skip(index, func, args, kwargs)
        inputs = tensors_of((args, kwargs))
        keys = [t.untyped_storage()._cdata if is_plain(t) else 0 for t in inputs]
        if not self._unknown.isdisjoint(keys):
            raise Again
        if writes(func):
            self._protect(keys)
        output = (self._products.get(func) or func)(*args, **kwargs)
        if func in _PICKS:
            self._pick(args)
        self._follow(index, func, kwargs, inputs, keys, output)
        return output

    def _skip(self, index: int, func: Any, args: Any, kwargs: Any) -> Any:
        op = self.state.script[index]
        if op.function is not func:
            raise Again
        if func in _PICKS:
            self._pick(args)
        self._next = max([self._next, *(made.memory + 1 for made in _mades(op.made))])
        if op.repeat:
            return func(*args, **kwargs)
        return _mapped(op.made, lambda value: self._rebuilt(value) if isinstance(value, Made) else value)

    def _follow(self, index: int, func: Any, kwargs: Any, inputs: Sequence[Tensor], keys: Sequence[int], output: Any) -> None:
        """Takes note of an operator that was executed."""
        outside = False

        def note(value: Any) -> Any:
            nonlocal outside
            if not isinstance(value, Tensor):
                return value
            if not is_plain(value):
                raise Again
            made = self._made(value, keys)
            outside |= made is None
            return made

        read = tuple(self.numbers.get(key, OUTSIDE) for key in keys)
        made = _mapped(output, note)
        repeat = (outside and not writes(func)) or torch.Tag.inplace_view in getattr(func, "tags", ())
        self.state.script.append(_Op(func, made, repeat))
        if self.same and self.tape is not None:
            known = index < len(self.tape.functions) and self.tape.functions[index] is func
            self.same = known and self.tape.inputs[index] == read

    def _pick(self, args: Any) -> None:
        """Remembers which rows a model picks, as it does to send tokens to an expert."""
        if len(args) == 3:
            size, chosen = args[0].shape[args[1]], [args[2]]
        else:
            size = next((args[0].shape[i] for i, one in enumerate(args[1]) if one is not None), 0)
            chosen = [one for one in args[1] if one is not None]
        plain = len(chosen) == 1 and chosen[0].ndim == 1 and chosen[0].dtype in (torch.int64, torch.int32)
        known = plain and chosen[0].untyped_storage()._cdata not in self._unknown
        self.picked = (size, chosen[0]) if known else self.picked if not plain else None

    def _made(self, tensor: Tensor, keys: Sequence[int]) -> Made | None:
        """The description of an output; None for a view of something from outside."""
        if tensor.untyped_storage()._cdata not in self.numbers and tensor.untyped_storage()._cdata in keys:
            return None
        return self.take(tensor)

    def take(self, tensor: Tensor) -> Made:
        """Numbers the memory of a tensor, and holds it if it will be needed when the run is saved."""
        storage = tensor.untyped_storage()
        number = self.numbers.get(storage._cdata)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._know(storage, number)
            size, device = storage.nbytes(), tensor.device
            self.state.most[device] = max(self.state.most.get(device, 0), size)
            if not tensor.is_floating_point() and size <= _SMALL:
                self.state.small[number] = storage
            if self.tape is not None and self.tape.last_use.get(number, -1) >= self.save_at:
                self._held[number] = storage
        return Made(number, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()), tensor.device)

    def _know(self, storage: UntypedStorage, number: int) -> None:
        self._references.append(StorageWeakRef(storage))
        self.numbers[storage._cdata] = number

    def _bring(self, number: int, storage: UntypedStorage) -> UntypedStorage:
        """Makes memory that was kept part of this run."""
        self._here[number] = storage
        self._know(storage, number)
        if self.tape is not None and self.tape.last_use.get(number, -1) >= self.save_at:
            self._held[number] = storage
        return storage

    def _rebuilt(self, made: Made) -> Tensor:
        """A tensor of an operator that is not executed: the one that was kept, or one without values."""
        storage = self._here.get(made.memory)
        if storage is None:
            kept = self.state.kept.get(made.memory)
            kept = self.state.small.get(made.memory) if kept is None else kept
            if kept is not None:
                storage = self._bring(made.memory, kept if self.device is None else on_device(kept, made.device))
        if storage is None:
            storage = self._scratch.get(made.device)
            if storage is None:
                storage = self._scratch[made.device] = UntypedStorage(self.state.most[made.device], device=made.device)
                self._unknown.add(storage._cdata)
        return _on(storage, made)

    def _protect(self, keys: Sequence[int]) -> None:
        """Copies memory that an operator is about to write to, where a later run needs what it holds now."""
        arguments = {made.memory for made in self.state.made if made is not None}
        for number in {self.numbers[key] for key in keys if key in self.numbers}:
            if number in arguments and not self.state.copies:
                self.state.copies = True
                raise Again
            if self._saved is not None and number in self._saved[1]:
                self._saved[1][number] = self._saved[1][number].clone()
            if self.device is None:  # else both are copies
                for memory in (self.state.kept, self.state.small):
                    if (known := memory.get(number)) is not None:
                        memory[number] = known.clone()


def _products(product: Callable[..., Tensor]) -> dict[Any, Callable[..., Tensor]]:
    """Operators that are replaced by a product of ours."""
    addmm = torch.ops.aten.addmm
    return {
        torch.ops.aten.mm.default: product,
        addmm.default: lambda bias, a, b, **kwargs: addmm(bias, a, b, **kwargs) if kwargs else product(a, b, bias),
    }


_PRODUCTS, _ROUGH = _products(matmul), _products(rough_matmul)
_PICKS = (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default)


def on_host(storage: UntypedStorage) -> UntypedStorage:
    """A copy of memory on the host."""
    return to_host(_bytes(storage)).untyped_storage()


def on_device(storage: UntypedStorage, device: torch.device) -> UntypedStorage:
    """A copy of memory on a device."""
    return to_device(_bytes(storage), device, copy=True).untyped_storage()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on(storage: UntypedStorage, made: Made) -> Tensor:
    empty = torch.empty(0, dtype=made.dtype, device=storage.device)
    return empty.set_(storage, made.offset, made.size, made.stride)  # type: ignore[call-overload]


def is_plain(tensor: Tensor) -> bool:
    ordinary = type(tensor) is Tensor or isinstance(tensor, nn.Parameter)
    return ordinary and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg() and not tensor.is_meta


def _takes_little_time(func: Any) -> bool:
    """Whether an operator computes a few operations for each element, always the same, and writes to no argument."""
    tags = getattr(func, "tags", ())
    if writes(func) or torch.Tag.nondeterministic_seeded in tags:
        return False
    reduces = getattr(torch.Tag, "reduction", None) in tags
    return reduces or torch.Tag.pointwise in tags or bool(getattr(func, "is_view", False)) or str(func) in _QUICK


_QUICK = {  # operators without such a tag, in the oldest torch at least
    "aten.native_layer_norm.default",
    "aten._fused_rms_norm.default",
    "aten._to_copy.default",
    "aten._unsafe_view.default",
    "aten.mean.dim",
    "aten.var_mean.correction",
}


def writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, Made):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def _mades(value: Any) -> Iterator[Made]:
    if isinstance(value, Made):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _mades(item)
