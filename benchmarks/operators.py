"""Cuts around every operator of torch's `op_db`, and compares each plan that claims to be exact with a brute-force check.

    python benchmarks/operators.py [--ops NAME,NAME:SAMPLE] [--samples N] [--sample N] [--again FILE] [--json FILE]
                                   [--jobs N] [--limit SECONDS]

Each case places one operator, called with one of torch's own sample inputs, between two linear layers. The first layer's units
lie along one dim of one of the operator's tensors; `shrink` removes some of them. Each case comes in several forms (`FORMS`):
the first layer's bias is nonzero or zero, the tensor's other dims belong to the model's input or to a parameter, and the
operator's other tensors are buffers or constants of the code.

The check does not use the library's own comparison. It zeroes the removed units' weights in a copy of the model (masking keeps
biases), and runs that copy and the small model in float64 on several inputs, and on another batch size where the operator
accepts one. The verdicts:

- left whole: the axis was not cut, and the error says why;
- exact, right: the plan claims to be exact, and the outputs agree to 1e-9;
- exact, WRONG: the plan claims to be exact, and they do not;
- not exact: the plan says that the cut is not exact;
- CRASH: another error, or a small model that does not run; ABORT: the process died; SLOW: no answer within the limit.

Cases run in worker processes, so that an operator which ends its process does not end the sweep. The exit status is 1 when a
case is wrong, crashes, aborts or is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
import types
import unittest
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from _bench import machine, show
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import secateur as sc
from secateur.surgery import unit_criterion

if "expecttest" not in sys.modules:  # torch's operator list imports this package for its own test cases only
    try:
        import expecttest  # noqa: F401
    except ImportError:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
from torch.testing._internal.common_methods_invocations import op_db

WHOLE, RIGHT, WRONG, TOLD = "left whole", "exact, right", "exact, WRONG", "not exact"
CRASH, ABORT, SLOW, SKIPPED = "CRASH", "ABORT", "SLOW", "skipped"
FAILURES = (WRONG, CRASH, ABORT, SLOW)
REFUSALS = ("is left to cut", "cannot be met")  # what `shrink` says when it leaves every axis whole
TOLERANCE = 1e-9
FEATURES = 4
CHUNK = 8  # operators for one process
# How a case is built: bias, fixed, frozen. The last two need an operator with several tensors.
FORMS = (
    *((True, True, False), (True, False, False), (False, True, False), (False, False, False)),
    *((True, False, True), (False, True, True)),
)


Chosen = tuple[int, int | None]  # an operator's place in `op_db`, and the number of the only sample to take, if any


@dataclass(frozen=True)
class Case:
    """One operator (by its place in `op_db`), one sample, and the axis of it that loses units."""

    op: int
    sample: int
    tensor: int  # which of the sample's tensors carries the units
    dim: int
    bias: bool  # whether the first layer's bias, which removed units leave behind, is nonzero
    fixed: bool  # whether the other dims are those of a parameter, or of the model's input
    frozen: bool  # whether the operator's other tensors are constants of the code, or buffers of the model

    def __str__(self) -> str:
        bias, dims = "bias" if self.bias else "zero bias", "fixed dims" if self.fixed else "input dims"
        form = f"{bias}, {dims}, constants" if self.frozen else f"{bias}, {dims}"
        return f"{op_name(self.op)} sample {self.sample} tensor {self.tensor} dim {self.dim}, {form}"


@dataclass
class Result:
    case: Case
    verdict: str
    why: str = ""
    seconds: float = 0.0


def op_name(index: int) -> str:
    op = op_db[index]
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


class Skip(Exception):
    """The case cannot be built; the message is the reason that is counted."""


# ---------------------------------------------------------------- one operator between two linear layers


class Between(nn.Module):
    """Linear, the operator, and a linear layer for each of its outputs, summed.

    The operator's other tensors are buffers, which can be cut along with the units, or constants of the code, which cannot. Its
    other arguments are constants of the code.
    """

    def __init__(self, function: Callable[..., Any], sample: Any, case: Case) -> None:
        super().__init__()
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        at = places[case.tensor]
        carrier, self.dim, self.batched = leaves[at], case.dim, False
        buffers = {i: f"given{i}" for i in places if i != at and not case.frozen}
        for i, name in buffers.items():
            self.register_buffer(name, leaves[i].detach().clone())
        leaves = [leaf.detach().clone() if i in places else leaf for i, leaf in enumerate(leaves)]

        def call(own: nn.Module, h: Tensor) -> list[Tensor]:
            values = [getattr(own, buffers[i]) if i in buffers else h if i == at else leaf for i, leaf in enumerate(leaves)]
            first, args, kwargs = tree_unflatten(values, spec)
            return [o for o in tree_leaves(function(first, *args, **kwargs)) if isinstance(o, Tensor) and o.numel()]

        self.call = call
        others = tuple(n for d, n in enumerate(carrier.shape) if d != case.dim)
        self.convolves = op_name(case.op).startswith("nn.functional.conv") and case.tensor == 0
        self.places = nn.Parameter(torch.zeros(*others, FEATURES)) if case.fixed else None
        self.shape = () if case.fixed else others
        self.a = nn.Linear(FEATURES, carrier.shape[case.dim])
        self.read = nn.ModuleList()

    def outputs(self, x: Tensor) -> list[Tensor]:
        return self.call(self, self.a(x if self.places is None else x + self.places).movedim(-1, self.dim))

    def forward(self, x: Tensor) -> Tensor:
        flat = [as_real(o).flatten(int(self.batched)) for o in self.outputs(x)]
        return sum(read(o) for read, o in zip(self.read, flat, strict=True))  # type: ignore[return-value]


def as_real(output: Tensor) -> Tensor:
    return torch.view_as_real(output.to(torch.complex128)) if output.is_complex() else output.double()


def build(case: Case, sample: Any, function: Callable[..., Any]) -> tuple[nn.Module, Callable[[int, int], Tensor]]:
    """The model of a case and a function that draws inputs for it: (seed, how many times the batch) -> x.

    First with weights and inputs of both signs; where the operator's answer to that is not finite, with values close to the
    sample's.
    """
    carrier = [v for v in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(v, Tensor)][case.tensor]
    units = carrier.detach().movedim(case.dim, 0).reshape(carrier.shape[case.dim], -1).double()
    draw = torch.Generator().manual_seed(case.dim)
    why = ""
    for near in (False, True):
        model = Between(function, sample, case).double()
        mean, spread = units.mean(1), float(units.std()) if units.numel() > 1 else 1.0
        weight = torch.rand(model.a.weight.shape, generator=draw, dtype=torch.float64)
        if model.places is not None:
            model.places.data = torch.rand(model.places.shape, generator=draw, dtype=torch.float64) - 0.5
        if near:
            model.a.weight.data = weight / weight.sum(1, keepdim=True) * mean[:, None] * (0.5 if case.bias else 1.0)
            constant = 0.5 * mean
        else:
            model.a.weight.data = (weight - 0.5) * 2 * max(spread, 0.1)
            constant = mean + 0.1
        model.a.bias.data = constant if case.bias else torch.zeros_like(constant)

        def inputs(seed: int, times: int = 1, near: bool = near, shape: tuple[int, ...] = model.shape) -> Tensor:
            draw = torch.Generator().manual_seed(100 + seed)
            shape = (times * shape[0], *shape[1:], FEATURES) if shape else (FEATURES,)
            return torch.rand(shape, generator=draw, dtype=torch.float64) + (0.5 if near else -0.5)

        try:
            out = run(model.outputs, inputs(0))
            assert not any(o.layout is not torch.strided for o in out), "sparse output"
            if not out:
                raise Skip("no tensor to read comes out")
            model.batched = bool(case.dim and model.shape) and _follows_batch(model, inputs, out)
            model.read = nn.ModuleList(nn.Linear(as_real(o).flatten(int(model.batched)).shape[-1], 3) for o in out).double()
            reads = torch.Generator().manual_seed(3)
            for p in model.read.parameters():
                p.data = torch.randn(p.shape, generator=reads, dtype=torch.float64)
            if bool(run(model, inputs(0)).isfinite().all()):
                return model.eval(), inputs
            why = "not finite on the values of a linear layer"
        except Skip:
            raise
        except Exception as error:
            why = "fails on the values of a linear layer"
            if "sparse" in str(error):
                why = "sparse"
    raise Skip(why)


def _follows_batch(model: Any, inputs: Callable[..., Tensor], out: list[Tensor]) -> bool:
    """Whether the operator takes twice the batch, and all its outputs are twice as long along their first dim."""
    with contextlib.suppress(Exception):
        twice = run(model.outputs, inputs(0, 2))
        return all(o.dim() > 1 and t.shape == (2 * o.shape[0], *o.shape[1:]) for o, t in zip(out, twice, strict=True))
    return False


def run(function: Callable[..., Any], x: Tensor) -> Any:
    torch.manual_seed(0)  # random operators draw the same numbers where they draw as many
    with torch.no_grad():
        return function(x.clone())


# ---------------------------------------------------------------- the check


def examine(model: Any, inputs: Callable[..., Tensor], seed: int) -> tuple[str, str]:
    """The verdict on one case, and why."""
    try:
        small, plan = cut(model, inputs(0), seed)
    except ValueError as error:
        return (WHOLE if any(text in str(error) for text in REFUSALS) else CRASH), f"{type(error).__name__}: {error}"
    except Exception as error:
        return CRASH, place_of(error)
    kept = plan.cuts.tensors.get("a.weight", {}).get(0)
    if kept is None:
        return WHOLE, "the plan cut something else"
    claims = plan.metrics()["exact"]
    gone = len(model.a.weight) - len(kept)
    removed = [i for i in range(gone + len(kept)) if i not in set(kept)]
    verdict, worst, where, finite = _compare(model, small, inputs, removed, claims, biases=False)
    if model.convolves and claims and verdict is None and not worst <= TOLERANCE:
        # where a convolution pads its channels with zeros, masking zeroes their bias as well (docs/structured.md)
        verdict, worst, where, finite = _compare(model, small, inputs, removed, claims, biases=True)
    if verdict is not None:
        return verdict, where
    if not claims:
        return TOLD, next((row.why for row in plan.groups if row.why), "") or ""
    if reads_uninitialised(model, inputs(0)):
        return WRONG, "the output is uninitialised memory"
    if not worst <= TOLERANCE:
        return WRONG, f"error {worst:.1e} ({where}; {gone} of {gone + len(kept)} units removed)"
    return RIGHT, "" if finite else "not finite"


def _compare(
    model: Any, small: nn.Module, inputs: Callable[..., Tensor], removed: list[int], claims: bool, biases: bool
) -> tuple[str | None, float, str, bool]:
    """Compares the small model with a mask: a verdict if it fails at once; the largest error, where, whether it is finite."""
    masked = copy.deepcopy(model)
    masked.a.weight.data[removed] = 0
    if biases:
        masked.a.bias.data[removed] = 0
    worst, where, finite = 0.0, "", False
    for seed, times in [(0, 1), (1, 1), (2, 1), *([(3, 2)] if model.batched else [])]:
        try:
            expected = run(masked, inputs(seed, times))
        except Exception:
            continue  # the masked model itself does not run on these values
        try:
            found = run(small, inputs(seed, times))
        except Exception as error:
            return CRASH, 0.0, f"the small model does not run on input {seed}: {place_of(error)}", finite
        if found.shape != expected.shape:
            shapes = f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
            return (WRONG if claims else CRASH), 0.0, shapes, finite
        error = difference(found, expected)
        finite |= bool(expected.isfinite().all())
        if not error <= worst:
            worst, where = error, f"input {seed}, batch times {times}"
    return None, worst, where, finite


def cut(model: nn.Module, x: Tensor, seed: int) -> tuple[nn.Module, Any]:
    """Removes about half of the first layer's units; where that is impossible, another share of them."""
    size = len(model.a.weight)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(seed)

    @unit_criterion
    def at_random(units: Any) -> Tensor | str:
        if all(member.tensor != "a.weight" for member in units.group.members):
            return "not the axis that is examined"
        return torch.rand(units.group.size, generator=draw)

    refused: ValueError | None = None
    for share in dict.fromkeys((max(1, size // 2) / size, 0.5, (size - 1) / size, 1 / size, 0.6, 0.4, 0.75)):
        try:
            return sc.shrink(model, x, at_random, channels=share, floor=0.01)
        except ValueError as error:
            refused = refused or error
            if "cannot be met" not in str(error):
                break
    assert refused is not None
    raise refused


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value; entries that are the same infinity or both NaN are equal."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    scale = expected[expected.isfinite()].abs().max() if bool(expected.isfinite().any()) else torch.tensor(1.0)
    error = float(((found - expected).abs()[~same].max()) / scale.clamp_min(1e-30))
    return error if error == error else float("inf")


def reads_uninitialised(model: nn.Module, x: Tensor) -> bool:
    """Whether the output is NaN once torch fills new memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return bool(run(model, x).isnan().any()) and not bool(run(model, x).isfinite().any())
    except Exception:
        return False
    finally:
        torch.use_deterministic_algorithms(False)


def place_of(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return " ".join(f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})".split())[:300]


# ---------------------------------------------------------------- the cases of an operator


def samples_of(index: int, limit: int, only: int | None = None) -> list[tuple[int, Any]]:
    """At most `limit` samples that have cases, or the `only` one. Different kinds first: ranks, flags, names of arguments."""
    op = op_db[index]
    if not op.supports_dtype(torch.float64, "cpu"):
        raise Skip("does not take float64")
    if op.name in ("new_empty", "new_empty_strided"):
        raise Skip("takes nothing from its input but the dtype, and gives uninitialised memory")
    torch.manual_seed(0)
    random.seed(0)
    kinds: defaultdict[str, dict[str, tuple[int, Any]]] = defaultdict(dict)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=False)):
        if only in (None, number) and any(cases_of(index, number, sample)):
            leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
            words = [v.dim() if isinstance(v, Tensor) else str(type(v)) if type(v) in (int, float) else repr(v) for v in leaves]
            exact = repr([tuple(v.shape) if isinstance(v, Tensor) else repr(v) for v in leaves])
            kinds[repr((words, list(sample.kwargs)))].setdefault(exact, (number, sample))
    turns = zip_longest(*(kind.values() for kind in kinds.values()))
    ordered = [found for turn in turns for found in turn if found is not None]
    first = ordered[: len(kinds)]
    if limit < len(first):  # spread over the kinds
        return [first[round(i * (len(first) - 1) / max(1, limit - 1))] for i in range(limit)]
    return ordered[:limit]


def cases_of(index: int, number: int, sample: Any) -> Iterator[Case]:
    """Each dim of the sample's first two floating-point tensors, with and without a bias."""
    tensors = [v for v in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(v, Tensor)]
    if any(t.layout is not torch.strided for t in tensors):
        return
    usable = [i for i, t in enumerate(tensors) if t.dtype is torch.float64 and t.numel()]
    for tensor in usable[:2]:
        for dim in range(tensors[tensor].dim()):
            if tensors[tensor].shape[dim] > 1:
                for form in FORMS[: 6 if len(tensors) > 1 else 4]:
                    yield Case(index, number, tensor, dim, *form)


def results_of(
    op: Chosen, limit: int, done: Collection[Case] = (), begin: Callable[[Any], None] | None = None
) -> Iterator[Result]:
    """Examines the cases of one operator, except those already done; calls `begin` before each."""
    index, only = op
    nothing = Case(index, -1, -1, -1, False, False, False)
    try:
        samples = samples_of(index, limit, only)
    except Skip as reason:
        yield Result(nothing, SKIPPED, str(reason))
        return
    except Exception as error:
        yield Result(nothing, SKIPPED, f"its samples cannot be made ({type(error).__name__})")
        return
    if not samples:
        yield Result(nothing, SKIPPED, "no dense floating-point tensor with an axis of two or more")
    for number, sample in samples:
        for case in cases_of(index, number, sample):
            if case in done:
                continue
            if begin is not None:
                begin(case)
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    model, inputs = build(case, sample, op_db[index].op)
                    if begin is not None:
                        begin(True)
                    verdict, why = examine(model, inputs, zlib.crc32(str(case).encode()))
                except Skip as reason:
                    verdict, why = SKIPPED, str(reason)
                except Exception as error:  # a mistake of this file: it must not pass for one of the library
                    verdict, why = CRASH, f"in the sweep itself: {place_of(error)}"
            yield Result(case, verdict, why, time.perf_counter() - start)


# ---------------------------------------------------------------- worker processes


def work(ops: list[Chosen], samples: int, done: set[Case], pipe: Any) -> None:
    """Sends each case before it is built, True before it is cut, and its result; at the end None."""
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        for op in ops:
            pipe.send(Case(op[0], -1, -1, -1, False, False, False))
            for result in results_of(op, samples, done, pipe.send):
                pipe.send(result)
    pipe.send(None)


class Job:
    """A process that examines a few operators, except for cases that are done."""

    def __init__(self, ops: list[Chosen], samples: int, done: set[Case]) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe(duplex=False)
        self.process = fork.Process(target=work, args=(ops, samples, done, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ops, self.since, self.over = ops, time.monotonic(), False
        self.case, self.cutting = Case(ops[0][0], -1, -1, -1, False, False, False), False

    def news(self) -> Iterator[Result]:
        """The results that have come in since the last call. Raises EOFError when the process died."""
        while not self.over and self.pipe.poll():
            message, self.since = self.pipe.recv(), time.monotonic()
            if isinstance(message, Result):
                yield message
            elif isinstance(message, Case):
                self.case, self.cutting = message, False
            elif message:
                self.cutting = True
            else:
                self.over = True

    def end(self) -> int | None:
        """Ends the process and returns the exit code it had."""
        self.process.join(None if self.over else 0.5)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        self.pipe.close()
        return code


def sweep(
    ops: Iterable[Chosen], samples: int, jobs: int, seconds: float, tell: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Examines the operators in `jobs` processes at a time; a case that ends its process, or is late, ends nothing else."""
    ops, running, results = list(ops), [], []
    waiting = [ops[i : i + CHUNK] for i in range(0, len(ops), CHUNK)][::-1]

    def note(result: Result) -> None:
        results.append(result)
        tell(result)

    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(Job(waiting.pop(), samples, {r.case for r in results}))
        wait([job.pipe for job in running], timeout=0.5)
        for job in running.copy():
            died = False
            try:
                for result in job.news():
                    note(result)
            except (EOFError, OSError):
                died = True
            late = time.monotonic() - job.since > seconds
            if not (job.over or died or late):
                continue
            running.remove(job)
            code = job.end()
            if not job.over:
                verdict, why = (ABORT, f"exit code {code}") if died else (SLOW, f"no answer after {seconds:g} s")
                if not job.cutting:
                    verdict, why = SKIPPED, "the operator alone ends the process or takes too long on these values"
                note(Result(job.case, verdict, why, time.monotonic() - job.since))
                rest = job.ops[[op for op, _ in job.ops].index(job.case.op) + (job.case.sample < 0) :]
                waiting += [rest] if rest else []
    return results


# ---------------------------------------------------------------- the command


def find_ops(names: Iterable[str]) -> list[Chosen]:
    """Finds operators by the names torch gives them, with or without the variant; `name:3` takes sample 3 alone."""
    found: list[Chosen] = []
    for given in names:
        name, _, number = given.partition(":")
        places = [i for i, op in enumerate(op_db) if name in (op.name, op_name(i))]
        if not places:
            raise ValueError(f"op_db has no operator {name!r}")
        found += [(i, int(number) if number else None) for i in places]
    return list(dict.fromkeys(found))


def summary(results: list[Result]) -> int:
    """Prints the counts, the reasons for skipped cases and a line for each failure; returns how many failed."""
    verdicts = (WHOLE, RIGHT, TOLD, *FAILURES, SKIPPED)
    counts = Counter(r.verdict for r in results)
    ops = {v: {op_name(r.case.op) for r in results if r.verdict == v} for v in verdicts}
    vacuous = sum(r.verdict == RIGHT and r.why != "" for r in results)
    show(f"Operators: {machine()}", ["", "cases", "operators"], [[v, str(counts[v]), str(len(ops[v]))] for v in verdicts])
    print(f"{vacuous} of the cases that are right compare no finite number")
    for why, number in Counter(r.why for r in results if r.verdict == SKIPPED).most_common():
        print(f"skipped, {number}: {why}")
    for verdict in FAILURES:
        for r in results:
            if r.verdict == verdict:
                print(f"{verdict}: {r.case}: {r.why}")
    failing = {v: ", ".join(sorted(ops[v])) for v in FAILURES if ops[v]}
    for verdict, names in failing.items():
        print(f"{verdict} in {len(ops[verdict])} operators: {names}")
    return sum(counts[v] for v in FAILURES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ops", default="", help="names in op_db, separated by commas; name:3 takes the sample with that number alone"
    )
    parser.add_argument("--again", default="", help="a file that --json wrote: only operators that failed there")
    parser.add_argument("--samples", type=int, default=4, help="samples of each operator")
    parser.add_argument("--sample", type=int, default=0, help="a seeded random choice of so many operators")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=30, help="seconds for one case")
    parser.add_argument("--json", default="", help="a file for all results")
    options = parser.parse_args()
    ops: list[Chosen] = find_ops(options.ops.split(",")) if options.ops else [(i, None) for i in range(len(op_db))]
    if options.again:
        failed = {row["name"] for row in json.loads(Path(options.again).read_text()) if row["verdict"] in FAILURES}
        ops = [op for op in ops if op_name(op[0]) in failed]
    if options.sample:
        ops = random.Random(0).sample(ops, min(options.sample, len(ops)))
    begin = time.perf_counter()

    def tell(result: Result) -> None:
        if result.verdict in FAILURES:
            print(f"{result.verdict}: {result.case}: {result.why}", flush=True)

    results = sweep(ops, options.samples, options.jobs, options.limit, tell)
    failed = summary(results)
    slow = max(results, key=lambda r: r.seconds)
    print(f"{len(results)} cases in {time.perf_counter() - begin:.0f} s; the slowest took {slow.seconds:.1f} s ({slow.case})")
    if options.json:
        rows = [
            {"name": op_name(r.case.op), **asdict(r.case), "verdict": r.verdict, "why": r.why, "seconds": r.seconds}
            for r in results
        ]
        Path(options.json).write_text(json.dumps(rows, indent=0))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
