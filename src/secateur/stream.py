"""Runs a model one block at a time: the inputs of a block are computed once, the block is changed, its outputs feed the next.

A block is any module of the model. `record` runs the model and keeps the calls that one module receives. `stream` does so for
several blocks in turn, without running the model from its beginning for each. Gates, `depth=`, refit and the methods that need
Gram matrices are all built on this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ._arguments import apart, copied, first_row, is_tree, moved, objects_of, replaced, tensors_of
from .edit import StandIns
from .outside import Watch
from .paused import paused_calls
from .stats import on_batch, split_batch


@dataclass
class Replay:
    """A module and the calls it received, which can be repeated: `run` yields one output per call.

    Each repetition gets its own copy of the arguments, because a module may write to them (in place, or into a cache).
    """

    module: nn.Module
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    batches: list[int] = field(default_factory=list)  # the number of the batch of each call, where the calls were recorded

    def run(self) -> Iterator[Any]:
        """Calls the module again, as it is now, with the recorded arguments."""
        for args, kwargs in self.calls:
            args, kwargs = copied(args, {}), copied(kwargs, {})
            with on_batch(self.module, args, kwargs):
                output = self.module(*args, **kwargs)
            yield output


def record(model: nn.Module, module: nn.Module, batches: Iterable[Any]) -> Replay:
    """Runs the model on every batch and records the calls that `module` receives (the model itself is a module too)."""
    found = Replay(module, [])
    if module is model:
        found.calls = [(args, kwargs) for args, kwargs, _ in map(split_batch, batches)]
        found.batches = list(range(len(found.calls)))
        return found

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        memo: dict[Any, Any] = {}
        found.calls.append((copied(args, memo), copied(kwargs, memo)))

    with _hook(module.register_forward_pre_hook(see, with_kwargs=True, prepend=True)):
        for number, batch in enumerate(batches):
            _call(model, batch)
            found.batches += [number] * (len(found.calls) - len(found.batches))
    return found


def stream(model: nn.Module, modules: Sequence[nn.Module], batches: Sequence[Any]) -> Generator[Replay]:
    """Yields a `Replay` of each module in turn, with the inputs that the modules before it, as they are by then, produce.

    Change a module before asking for the next one. A `Replay` is valid until then. There are three cases:

    - Every module reads tensors that earlier modules returned, as decoder blocks do: each is run once more to feed the next.
      The other arguments (attention masks, position embeddings, an empty cache) are those that the first run passed.
    - The first batch calls each module once, in this order: the runs of all batches pause at each module (see `paused`).
    - Otherwise, and from the first module on that a batch does not call in this order, the model is run from its beginning
      for each module.
    """
    chain = Chain.of(model, modules, batches)
    if isinstance(chain, str):
        done = 0
        if len(modules) > 1 and _in_turn(model, modules, batches[0]):
            for done, calls in enumerate(paused_calls(partial(_call, model), modules, batches), 1):
                yield Replay(modules[done - 1], calls)
        for module in modules[done:]:
            yield record(model, module, batches)
        return
    feed = chain.feed()
    for i, module in enumerate(modules):
        replay = Replay(module, feed.calls(i))
        yield replay
        if i in chain.last_use:
            feed.put(i, map(apart, replay.run()))  # a module may write to what it returned before


def _in_turn(model: nn.Module, modules: Sequence[nn.Module], batch: Any) -> bool:
    """True if the model calls each of these modules once on this batch, in this order."""
    called: list[nn.Module] = []
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_hook(module.register_forward_pre_hook(lambda own, _: called.append(own))))
        _call(model, batch)
    return called == list(modules)


class Chain:
    """Blocks that feed each other: the arguments of their calls on every batch, and which of them earlier blocks return."""

    def __init__(self, links: list[list[_Call]]) -> None:
        self.links = links
        self.last_use = {use.producer: i for calls in links for i, call in enumerate(calls) for use in call.uses}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        modules: Sequence[nn.Module],
        batches: Iterable[Any],
        keep: Callable[[Any], Any] = lambda arguments: arguments,
        present: bool = True,
    ) -> Chain | str:
        """Returns the reason where the blocks do not simply feed each other. `keep` may move the arguments that are kept.

        Only the first block is run for this, where possible: the others return tensors without values. Where it returns
        tensors of the shape of its input, it is run on the first batch only. Where blocks get one object, such as a cache, or
        a tensor that the first one writes to, the model also runs as a whole on the first batch, to see whether they read from
        it what others have left there. Without the weights of the other blocks (`present` is False), these run on the meta
        device for that.
        """
        if len(modules) < 2:
            return "there are fewer than two blocks"
        links, like = [], _Template()
        for batch in batches:
            calls = _linked(model, modules, batch, like) or _linked(model, modules, batch, None)
            if calls is None:
                return "they do not each read what the block before returned"
            if not links and (present or like.tree is not None) and _runs_again(model, modules, batch, like):
                return "they run more than once"
            if not links and _share_objects(calls):
                watch = Watch()
                _linked(model, modules, batch, None if present else _Template(), watch)
                for owner, reader in sorted((int(a), int(b)) for a, b in watch.found if a and b):
                    return (
                        f"block {reader} reads tensors that block {owner} left in an argument, such as a cache, that both get"
                    )
            kept = keep([(call.args, call.kwargs) for call in calls])
            links.append([_Call(args, kwargs, call.uses) for (args, kwargs), call in zip(kept, calls, strict=True)])
        return cls(links)

    def feed(self) -> Feed:
        return Feed(self)


class Feed:
    """Holds the outputs of the blocks of a chain until the last block that reads them has run."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.made: list[dict[int, list[Tensor]]] = [{} for _ in chain.links]
        self.trees: dict[int, list[Any]] = {}

    def calls(self, i: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of block `i`, one call for each batch."""
        return [calls[i].filled(made) for calls, made in zip(self.chain.links, self.made, strict=True)]

    def output(self, i: int, batch: int) -> Any:
        """Returns the output of block `i` on one batch. `i` must be the block of the last `put`."""
        return replaced(self.trees[i][batch], dict(enumerate(self.made[batch][i])), [0])

    def put(self, i: int, outputs: Iterable[Any]) -> None:
        """Stores the outputs of block `i`, and drops outputs that no later block reads."""
        trees = self.trees = {i: []}
        for made, output in zip(self.made, outputs, strict=True):
            made[i] = tensors_of(output)
            trees[i].append(replaced(output, dict.fromkeys(range(len(made[i])), _LATER), [0]))
            for producer in [p for p in made if self.chain.last_use.get(p, -1) <= i]:
                del made[producer]


class _Use(NamedTuple):
    """A place in the arguments of a block that holds tensor `number` of what block `producer` returned."""

    place: int
    producer: int
    number: int


@dataclass
class _Call:
    """The arguments of one call of a block, and which of their tensors come from earlier blocks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uses: list[_Use] = field(default_factory=list)
    objects: frozenset[int] = frozenset()  # the ids of the objects among them, and of tensors that blocks write to

    def filled(self, made: Mapping[int, Sequence[Tensor]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the tensors that earlier blocks now return."""
        fresh = {use.place: made[use.producer][use.number] for use in self.uses}
        args, kwargs = replaced((self.args, self.kwargs), fresh, [0])
        return args, kwargs


_LATER = torch.empty(0)  # stands where a tensor of an earlier block will be put


class _Enough(BaseException):
    """Ends a run of the model: the last block has received its inputs."""


class _Template:
    """The output of the first block of a chain: `tree`, set if its tensors have the shape, dtype and device of its input."""

    tree: Any = None

    def learn(self, arguments: Any, output: Any) -> None:
        looks = [(t.shape, t.dtype, t.device) for t in tensors_of(arguments)[:1]]
        alike = looks and all((t.shape, t.dtype, t.device) == looks[0] for t in tensors_of(output))
        self.tree = output if alike and _holds_tensors_alone(output) and tensors_of(output) else None


def _holds_tensors_alone(tree: Any) -> bool:
    """True if a tree holds tensors and None, and no numbers or text, such as the size of an image."""
    if isinstance(tree, tuple | list | dict):
        return is_tree(tree) and all(map(_holds_tensors_alone, tree.values() if isinstance(tree, dict) else tree))
    return tree is None or isinstance(tree, Tensor)


def _share_objects(calls: Sequence[_Call]) -> bool:
    """Whether two blocks get one object, through which they could pass values."""
    seen = [number for call in calls for number in call.objects]
    return len(seen) > len(set(seen))


def _on_meta(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a block without values, up to an operator that needs them."""
    meta = torch.device("meta")
    with contextlib.suppress(Exception), StandIns(module, lambda _, tensor: tensor.to(meta)):
        args, kwargs = moved((args, kwargs), meta)
        forward(*args, **kwargs)


def _runs_again(model: nn.Module, modules: Sequence[nn.Module], batch: Any, like: _Template) -> bool:
    """Whether the model runs a block a second time after the last one. The run is of one sample, where the model takes that.

    With a template, blocks return zeros instead of running.
    """
    seen: set[nn.Module] = set()
    again = False

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal again
        again = module in seen
        seen.add(module)
        if again:
            raise _Enough

    def stub(*args: Any, **kwargs: Any) -> Any:
        made = tensors_of((args, kwargs))[:1] * len(tensors_of(like.tree))
        return replaced(like.tree, {i: torch.zeros_like(t) for i, t in enumerate(made)}, [0])

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_hook(module.register_forward_pre_hook(enter)))
            if like.tree is not None:
                stack.enter_context(instead(module, stub))
        whole = split_batch(batch)[:2]
        for args, kwargs in (first_row(whole), whole):
            seen.clear()
            with contextlib.suppress(_Enough, Exception):  # it may refuse other sizes, or zeros
                _call(model, kwargs if kwargs else (args, None))
                break
            if again:
                break
    return again


def _linked(
    model: nn.Module, modules: Sequence[nn.Module], batch: Any, like: _Template | None, watch: Watch | None = None
) -> list[_Call] | None:
    """Runs the model on one batch and finds, for each block, which arguments are tensors that earlier blocks returned.

    With a template, all blocks but the first return tensors without values, and None is returned if anything reads those. The
    first one does so too if the template is known. With a watch, which looks at all blocks, they run on the meta device then.
    """
    calls: list[_Call] = []
    returned: dict[int, tuple[int, int]] = {}  # tensor -> (block, number of the tensor in its output)
    alive: list[Any] = []  # holds what was seen, so that no id is used twice
    memo: dict[Any, Any] = {}
    versions: dict[int, tuple[Tensor, int]] = {}  # of the arguments of the block that runs
    written: set[int] = set()  # arguments that a block wrote to and did not return
    in_order = True
    first: list[Any] = []
    touched = _Touched()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal in_order
        if len(calls) >= len(modules) or module is not modules[len(calls)]:
            in_order = False
            raise _Enough
        uses = [_Use(i, *returned[id(t)]) for i, t in enumerate(tensors_of((args, kwargs))) if id(t) in returned]
        if calls and not any(use.producer == len(calls) - 1 and use.number == 0 for use in uses):
            in_order = False  # the output of the block before arrives here changed, or not at all
            raise _Enough
        held = replaced((args, kwargs), {use.place: _LATER for use in uses}, [0])
        alive.append((args, kwargs))
        with touched.aside():
            own_args, own_kwargs = held if watch is not None else copied(held, memo)  # a watch would see the copies as reads
        known = {id(t) for t in tensors_of((args, kwargs))} & written
        objects = frozenset(id(one) for one in objects_of((args, *kwargs.values()))) | known
        versions.clear()
        versions.update({id(t): (t, t._version) for t in tensors_of((args, kwargs)) if not t.is_inference()})
        calls.append(_Call(own_args, own_kwargs, uses, objects))
        if len(calls) == len(modules) and watch is None:
            raise _Enough

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not first and like is not None and like.tree is None:
            like.learn((args, kwargs), output)
        first.append(output)
        alive.append(output)
        new = {key for key, (t, version) in versions.items() if t._version != version} - {id(t) for t in tensors_of(output)}
        written.update(new)
        calls[-1].objects |= new
        returned.update({id(t): (len(calls) - 1, number) for number, t in enumerate(tensors_of(output))})

    def stub(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if watch is not None:
            with touched.aside():
                _on_meta(module, forward, args, kwargs)
        tree = first[0] if first else like.tree if like is not None else None
        if not _holds_tensors_alone(tree):
            raise _Enough  # what it holds cannot be replaced, or may be another number for each block
        made = tensors_of(tree) if first else tensors_of((args, kwargs))[:1] * len(tensors_of(tree))
        with touched.aside():
            empty = {i: touched.watch(torch.empty_like(t)) for i, t in enumerate(made)}
        return replaced(tree, empty, [0])

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_hook(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)))
            stack.enter_context(_hook(module.register_forward_hook(leave, with_kwargs=True)))
        if watch is not None:
            stack.enter_context(watch.calls_of({str(i): module for i, module in enumerate(modules)}))
            stack.enter_context(watch)
        if like is not None:
            stack.enter_context(touched)
            for module in modules[like.tree is None : len(modules) - (watch is None)]:
                stack.enter_context(instead(module, partial(stub, module, module.forward)))
        # A model may refuse the shapes of tensors without values. If it refuses its own, the run without a template raises.
        with contextlib.suppress(_Enough, *([] if like is None else [Exception])):
            _call(model, batch)
    return calls if in_order and len(calls) == len(modules) else None


class _Touched(TorchDispatchMode):
    """Ends a run when an operator reads one of the watched tensors."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[UntypedStorage] = []
        self._keys: set[int] = set()
        self._off = False

    def watch(self, tensor: Tensor) -> Tensor:
        self.watched.append(tensor.untyped_storage())
        self._keys.add(self.watched[-1]._cdata)
        return tensor

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self._off = True
        try:
            yield
        finally:
            self._off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._off and self._keys:
            for t in tensors_of((args, kwargs or {})):
                if t.layout == torch.strided and t.untyped_storage()._cdata in self._keys:
                    raise _Enough
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives a module another `forward`, inside the context."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _call(model: nn.Module, batch: Any) -> None:
    args, kwargs, _ = split_batch(batch)
    with on_batch(model, args, kwargs):
        args, kwargs = copied((args, kwargs), {})  # a model may write to its inputs
        model(*args, **kwargs)


@contextlib.contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
