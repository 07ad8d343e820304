"""Which architectures `shrink` cuts, and whether the cut is exact: transformers' model types made tiny, timm, plain probes.

    python benchmarks/shrink_coverage.py [--only GLOB] [--jobs N] [--limit SECONDS] [--draws N]

Each model, in float64 and in a process of its own: random units, three times, a share of 0.6 of them (or the nearest that whole
units can give), through `shrink` and `plan.verify`; where the cut is not exact, once more with `exact_only`. The verdicts:

- ok: it runs, the output moved, and what is said to be exact differs from the masked model by less than 1e-6 (1e-5 where the
  model itself casts to float32 on the way);
- refused: an error that says why, and the model is as it was;
- no-op: nothing was cut, or no cut moved the output; wrong: said to be exact and is not; crash: anything else.

Wiring is judged a second way, because across a normalisation nothing is exact: the units are cut by plain slicing and compared
with a run of the whole model in which normalisations see the kept units alone. Decoders also have to generate, cache and all.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from _bench import machine, show
from _processes import in_processes
from _zoo import Built, images, kinds, quiet, settled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[1] / "tests" / "trace"))
from probes import PROBES

SHARES = (0.6, 0.55, 0.65, 0.5, 0.7, 0.75, 0.8, 0.45, 0.4, 0.85, 0.9, 0.35, 0.3)
EXACT = 1e-6
NARROW = 1e-5  # where a float64 model casts to float32 inside, as many normalisations do
SINGLE = 1e-3  # where the model refuses float64


@dataclass
class Result:
    """What became of one model. `claimed`: how many of the units are said to be cut exactly; `error`: the largest measured."""

    name: str
    task: str
    verdict: str = "crash"
    why: str = ""
    units: int = 0
    cut: int = 0
    claimed: int = 0
    error: float = 0.0
    wired: float | None = None
    generates: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        wired = "-" if self.wired is None else f"{self.wired:.0e}"
        text = f"{self.name:34} {self.verdict:8} {self.cut:5} of {self.units:5} units, {self.claimed:5} exactly"
        return (
            f"{text}, error {self.error:.0e}, wiring {wired:6} {self.generates:10} {self.seconds:5.1f} s  {self.why}".rstrip()
        )


def examine(result: Result, model: nn.Module, inputs: dict[str, Tensor], draws: int = 3) -> None:
    """Fill in the result, by the public way."""
    model, inputs, tolerance = widened(model, inputs)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    moved, small = False, None
    for seed in range(draws):
        try:
            small, plan = nearest(model, inputs, seed)
        except ValueError as error:
            result.verdict, result.why = "refused", str(error)
            return
        rows = plan.groups
        result.units = sum(row.before for row in rows)
        result.cut = max(result.cut, sum(row.before - row.after for row in rows))
        result.claimed = max(result.claimed, sum(row.before - row.after for row in rows if row.why is None))
        plan = plan if plan.metrics()["exact"] else exactly(model, inputs, seed)
        if plan is not None:
            found = plan.verify()
            moved |= found.moved
            result.error = max(result.error, found.max_error)
            if not found.max_error <= (tolerance if found.dtype == "float64" else SINGLE):
                result.verdict, result.why = "wrong", f"{found} (seed {seed})"
                return
        else:
            moved |= differs(model, small, inputs)
    same = all(torch.equal(v, state[k]) or v.isnan().any() for k, v in model.state_dict().items())
    result.verdict = "crash" if not same else "ok" if moved and result.cut else "no-op"
    result.why = "" if same else "the model was changed"
    result.wired = wiring(model, inputs, result, tolerance, draws)
    if small is not None and result.task == "causal_lm":
        result.generates = generation(model, small, inputs, result)


class Casts(TorchDispatchMode):
    """Whether a run casts to float32."""

    narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.narrow |= func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.float32
        return func(*args, **(kwargs or {}))


def widened(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor], float]:
    """In float64 where the model runs so."""
    from secateur.surgery.verify import tensors_of

    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    casts = Casts()
    try:
        with torch.no_grad(), casts:
            answer = call(model.double(), wide)
        if not all(t.isfinite().any() for t in tensors_of(answer)):
            raise ValueError("the answer is not finite")
        return model, wide, NARROW if casts.narrow else EXACT
    except Exception:
        return model.float(), inputs, SINGLE


def call(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return model(*inputs.values()) if positional(inputs) else model(**inputs)


def positional(inputs: dict[str, Tensor]) -> bool:
    return any(name.startswith("x") for name in inputs)


def given(inputs: dict[str, Tensor]) -> Any:
    return tuple(inputs.values()) if positional(inputs) else inputs


def nearest(model: nn.Module, inputs: dict[str, Tensor], seed: int, **options: Any) -> Any:
    """Cut random units; the first share that whole units can give."""
    import secateur as sc
    from secateur.surgery import shrink

    failed: ValueError | None = None
    for share in SHARES:
        try:
            return shrink(model, given(inputs), sc.random(seed), channels=share, **options)
        except ValueError as error:
            if "cannot be met" not in str(error):
                raise
            failed = failed or error
    assert failed is not None
    raise failed


def exactly(model: nn.Module, inputs: dict[str, Tensor], seed: int) -> Any:
    """The plan of a cut of the exact groups alone, or None where there is none."""
    try:
        return nearest(model, inputs, seed, exact_only=True)[1]
    except ValueError:
        return None


def differs(model: nn.Module, small: nn.Module, inputs: dict[str, Tensor]) -> bool:
    from secateur.surgery.verify import difference

    with torch.no_grad():
        return difference(call(small, inputs), call(model, inputs)) > 1e-9


def wiring(model: nn.Module, inputs: dict[str, Tensor], result: Result, tolerance: float, draws: int) -> float | None:
    """The largest difference between a model cut by slicing and the whole one run on the kept units."""
    from cutting import wiring_error

    try:
        error = wiring_error(model, given(inputs), draws)
    except Exception as failure:
        result.notes.append(f"wiring not compared: {type(failure).__name__}: {failure}"[:300])
        return None
    if not error <= tolerance:
        result.verdict, result.why = "wrong", f"wiring: {error:.1e}"
    return error


def generation(model: Any, small: Any, inputs: dict[str, Tensor], result: Result) -> str:
    """Whether the cut decoder generates where the whole one does, and the same with a cache as without."""

    def tokens(decoder: Any, cache: bool) -> Tensor | None:
        try:
            options = {"max_new_tokens": 3, "do_sample": False, "use_cache": cache, "pad_token_id": 0, "eos_token_id": None}
            return decoder.generate(inputs["input_ids"], **options)
        except Exception as error:
            if decoder is small:
                result.notes.append(f"generate: {type(error).__name__}: {error}"[:300])
            return None

    whole = [tokens(model, cache) for cache in (True, False)]
    cut = [tokens(small, cache) for cache in (True, False)]
    for before, after, how in zip(whole, cut, ("with", "without")):
        if before is not None and after is None:
            result.verdict, result.why = "crash", f"does not generate {how} a cache: {result.notes[-1:]}"
            return "fails"
    if whole[0] is None:
        return ""
    agree = [a is not None and b is not None and torch.equal(a, b) for a, b in (whole, cut)]
    if agree[0] and not agree[1]:
        result.verdict, result.why = "wrong", "generates other tokens with a cache than without"
    return "generates"


def from_probe(build: Callable[[], Any]) -> Built:
    model, *inputs = build()
    return settled(model), {f"x{i}": x for i, x in enumerate(inputs)}


# ---------------------------------------------------------------- one process for each model


def work(name: str, task: str, build: Callable[[], Built], draws: int) -> Result:
    result = Result(name, task)
    begin = time.perf_counter()
    try:
        model, inputs = build()
    except Exception as error:
        result.verdict, result.why = "not built", f"{type(error).__name__}: {error}".split("\n")[0][:160]
    else:
        try:
            examine(result, model, inputs, draws)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            result.verdict = "crash"
            result.why = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    result.seconds = time.perf_counter() - begin
    result.why = " ".join(result.why.split())[:400]
    return result


def sweep(models: dict[str, tuple[str, Callable[[], Built]]], jobs: int, limit: float, draws: int) -> list[Result]:
    """Every model in a process of its own, `jobs` at a time; a line for each as it ends."""
    calls = {name: (work, name, task, build, draws) for name, (task, build) in models.items()}
    done = []
    for name, found, seconds in in_processes(calls, jobs, limit):
        result = found if isinstance(found, Result) else Result(name, models[name][0], why=found, seconds=seconds)
        done.append(result)
        print(result.line(), flush=True)
    return done


def summary(results: list[Result]) -> None:
    built = [r for r in results if r.verdict != "not built"]
    verdicts = ("ok", "refused", "no-op", "wrong", "crash")
    kinds_of = {r.name: "timm" if r.task == "timm" else "probe" if r.task == "probe" else "transformers" for r in built}
    rows = []
    for kind in ("transformers", "timm", "probe", "all"):
        own = [r for r in built if kind in ("all", kinds_of[r.name])]
        counts = Counter(r.verdict for r in own)
        whole = sum(r.verdict == "ok" and r.claimed == r.cut for r in own)
        some = sum(r.verdict == "ok" and r.claimed > 0 for r in own)
        checked = sum(r.wired is not None for r in own)
        rows.append([kind, str(len(own)), *(str(counts[v]) for v in verdicts), str(whole), str(some), str(checked)])
    header = ["", "models", *verdicts, "all exact", "some exact", "wiring checked"]
    show(f"Coverage: {machine()}", header, rows)
    for verdict in verdicts[1:]:
        for r in built:
            if r.verdict == verdict:
                print(f"{verdict}: {r.name}: {r.why}")
    left = [r.name for r in results if r.verdict == "not built"]
    print(f"not counted, because no small form of them was found: {len(left)}")
    print(f"{sum(r.seconds for r in built):.0f} s in all; {sum(bool(r.generates) for r in built)} decoders generated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a glob over names: 'llama*', 'timm/*', 'probe/*'")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one model")
    parser.add_argument("--draws", type=int, default=3, help="random selections for each model; one can pass by luck")
    options = parser.parse_args()
    with quiet():
        import secateur.surgery  # noqa: F401  (imported once, before the processes fork)

        try:
            models = kinds()
        except ImportError:
            models = {}
        models |= {f"probe/{name}": ("probe", lambda build=build: from_probe(build)) for name, build in PROBES.items()}
        models |= images()
    chosen = {n: m for n, m in models.items() if any(fnmatch.fnmatchcase(n, g) for g in options.only.split(","))}
    if not chosen:
        sys.exit(f"--only {options.only!r} matches none of the {len(models)} models")
    summary(sweep(chosen, options.jobs, options.limit, options.draws))


if __name__ == "__main__":
    main()
