"""Which architectures the one-shot methods prune, and whether the result is right: transformers' model types made tiny, timm.

    python benchmarks/oneshot_coverage.py [--only GLOB] [--task GLOB] [--method NAME,NAME] [--limit SECONDS] [--jobs N]

Each model runs in a process of its own, on three batches: one as it is, one with other values, and one of a single sample (with
padding, where the model takes it). The methods are `"flow"` with the pattern 2:4, `"sparsegpt"` with half of the weights, and
`"loss"` with half of the weights for models that return logits. A layer that an error names is excluded, as the error says, and
the call is repeated; the table says how many layers were left out.

Checked are: the exact pattern or count; finite weights; zeros where the masks are, and no others; other tensors, flags, hooks
and gradients as before; the same bits from a copy; an error not above that of the mask alone; a finite output; the dense model,
bit for bit, after `undo_`; and where channels were permuted, that the dense model still computes the same function. `inputs` is
a method that records what it gets. The Gram matrix of a linear layer, and the product with the inputs of the dense model,
have to be those that plain hooks see in the pruned model and in the dense one. The Gram matrix of any layer has to give the
squared change of its output that the new weights cause on these inputs. The verdicts:

- ok, or partly: with layers that were left out, because an error names them and says why;
- refused: an error with a reason, which names no layer; wrong: a check failed; crash: any other error; slow: over the limit.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from _bench import machine, show
from _processes import in_processes
from _zoo import Built, images, kinds, quiet
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

HOW: dict[str, dict[str, Any]] = {
    "flow": {"method": "flow", "pattern": "2:4"},
    "sparsegpt": {"method": "sparsegpt", "sparsity": 0.5},
    "loss": {"method": "loss", "sparsity": 0.5},
    "inputs": {"sparsity": 0.5},
}
VERDICTS = ("ok", "partly", "refused", "wrong", "crash", "slow")
REASONS = (ValueError, TypeError, NotImplementedError)
CLOSE = 1e-3  # of Gram matrices, relative to the largest element
OTHERWISE = (
    "solved as one stage|solved after the blocks|saw no token|padding could not|runs more than once"  # notes of other inputs
)
ROUNDED = 1e-2  # of products with the inputs of the dense model, which are rounded where they differ much
SAME = 1e-3  # of the output of the dense model with permuted channels


class Wrong(Exception):
    """A check failed."""


@dataclass
class Answer:
    """What became of one method on one model. `left` holds the layers that were left out, with the reason."""

    verdict: str
    why: str = ""
    left: dict[str, str] = field(default_factory=dict)
    notes: int = 0


def batches_for(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The inputs, others of the same shape, and one sample with padding, or without where the model does not take that."""
    draw = torch.Generator().manual_seed(4)

    def other(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=draw).to(tensor.dtype)
        return tensor.flip(-1) if name.endswith("input_ids") else tensor

    first = {name: tensor[:1] for name, tensor in inputs.items()}
    tries = [{name: other(name, tensor) for name, tensor in inputs.items()}, first]
    ids = inputs.get("input_ids")
    if ids is not None:
        padded = torch.ones_like(ids)
        padded[0, -2:] = 0
        tries.append({**inputs, "attention_mask": padded})
    found = [dict(inputs)]
    for batch in tries:
        try:
            run(model, batch)
            found.append(batch)
        except Exception:
            continue
    return found


@torch.no_grad()
def run(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The float tensors of the output."""
    torch.manual_seed(0)
    batch = {name: tensor.clone() for name, tensor in batch.items()}
    output = model(*batch.values()) if "x" in batch else model(**batch)
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def as_data(batches: Sequence[Mapping[str, Tensor]]) -> list[Any]:
    return [tuple(batch.values()) if "x" in batch else dict(batch) for batch in batches]


def examine(model: nn.Module, inputs: dict[str, Tensor], methods: Sequence[str]) -> dict[str, Answer]:
    model = model.float().eval()
    batches = batches_for(model, inputs)
    answers = {}
    for number, method in enumerate(methods):
        own = copy.deepcopy(model)
        for module in list(own.modules())[number % 2 :: 3]:
            module.training = True
        for parameter in list(own.parameters())[::4]:
            parameter.requires_grad_(False)
        answer, excluded = Answer("ok"), []
        if method == "loss" and not has_logits(model, batches[0]):
            continue
        while True:
            try:
                answer.notes = (recorded if method == "inputs" else pruned)(own, model, batches, method, excluded, answer)
                answer.verdict = "partly" if answer.left else "ok"
            except Wrong as error:
                answer.verdict, answer.why = "wrong", str(error)
            except REASONS as error:
                quoted = re.findall(r"'([^' ]+)'", str(error))
                names = [name for name, _ in own.named_parameters() if name not in excluded and match(name, quoted)]
                if names and "does not run on a batch" not in str(error):
                    answer.left |= dict.fromkeys(names, reason(error))
                    excluded += names
                    continue
                crashed = "does not run on a batch" in str(error) or "secateur" not in origin(error)
                answer.verdict, answer.why = "crash" if crashed else "refused", f"{type(error).__name__}: {error}"
            except Exception as error:
                answer.verdict, answer.why = "crash", f"{type(error).__name__}: {error} ({origin(error)})"
            break
        answer.why = " ".join(answer.why.split())[:500]
        answers[method] = answer
    return answers


def match(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def reason(error: Exception) -> str:
    """An error without the names of layers and numbers, by which reasons are counted."""
    return re.sub(r"[\d, ()]*\d[\d, ()]*", " N ", re.sub(r"'[^']*'", "NAME", " ".join(str(error).split())))[:160]


def origin(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{where.filename.rpartition('site-packages/')[2].rpartition('src/')[2]}:{where.lineno}"


def has_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    from secateur.curvature import logits_of

    try:
        with torch.no_grad():
            logits_of(model(*batch.values()) if "x" in batch else model(**batch))
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- a method of the package


def pruned(
    own: nn.Module, dense: nn.Module, batches: Sequence[dict[str, Tensor]], method: str, excluded: Sequence[str], _: Answer
) -> int:
    """Prunes a model and a copy of it, and checks what came out. Returns the number of notes."""
    import secateur as sc

    twin, before = copy.deepcopy(own), copy.deepcopy(own)
    how = {**HOW[method], "data": as_data(batches), "exclude": list(excluded)}
    try:
        plan = sc.prune_(own, keep_dense=True, **how)
    except Exception:
        unchanged(own, before, "after an error")
        raise
    other = sc.prune_(twin, **how)
    check(bool(plan.masks), "no layer was pruned")
    parameters = dict(own.named_parameters())
    for name, mask in plan.masks.items():
        weight = parameters[name].detach()
        check(bool(weight.isfinite().all()), f"{name} is not finite")
        check(not bool(weight[~mask].any()), f"{name} is not zero where the mask is")
        zeros = int((weight == 0).sum())
        check(zeros == int((~mask).sum()) + plan.zeros.get(name, 0), f"{name} has other zeros than the plan says")
        check(torch.equal(mask, other.masks[name]), f"{name} gets another mask the second time")
    for (name, one), two in zip(own.state_dict().items(), twin.state_dict().values(), strict=True):
        check(not isinstance(one, Tensor) or bits(one, two), f"{name} gets other values the second time")
    amounts(own, plan, method)
    moved = copy.deepcopy(before)
    if plan.order is not None and plan.order.orders:
        plan.order.move_(moved)
        for batch in batches:
            apart = distance(run(moved.eval(), batch), run(dense, batch))
            check(apart < SAME, f"the channels of the dense model in their new order change its output by {apart:.1e}")
        moved = copy.deepcopy(before)
        plan.order.move_(moved)
    unchanged(own, moved, "after pruning", leave=plan.masks)
    for name, one in plan.solved.items():
        check(one.error <= one.before * (1 + 1e-6), f"{name}: error {one.error:.3g}, and {one.before:.3g} with the mask alone")
    flags = [module.training for module in own.modules()]
    finite = all(bool(leaf.isfinite().all()) for batch in batches for leaf in run(own.eval(), batch)[:1])
    wanted = all(bool(leaf.isfinite().all()) for batch in batches for leaf in run(dense, batch)[:1])
    check(finite or not wanted, "the output is not finite")
    for module, flag in zip(own.modules(), flags, strict=True):
        module.training = flag
    missing = {n for n, p in before.named_parameters() if p.dim() >= 2} - set(plan.masks) - set(plan.skipped)
    tied = {id(p) for n, p in own.named_parameters(remove_duplicate=False) if n in plan.masks}
    missing = {n for n in missing if id(parameters[n]) not in tied}
    check(not missing, f"the plan names neither as pruned nor as skipped: {sorted(missing)[:3]}")
    plan.undo_()
    unchanged(own, before, "after undo_")
    str(plan)
    return len(plan.notes)


def amounts(model: nn.Module, plan: Any, method: str) -> None:
    """Checks the exact pattern, or the exact number of zeros."""
    from secateur.targeting import targets

    layouts = {t.name: t.layout for t in targets(model)[0]}
    if "pattern" in HOW[method]:
        for name, mask in plan.masks.items():
            rows = layouts[name].matrix(mask)
            for pool in rows.split(4, 1):  # the last pool of a row may be smaller, and keeps two as well
                check(bool((pool.sum(1) == min(2, pool.shape[1])).all()), f"{name} is not 2:4")
        return
    pruned = {name: int((~mask).sum()) for name, mask in plan.masks.items()}
    total = sum(mask.numel() for mask in plan.masks.values())
    if method == "loss":
        check(sum(pruned.values()) == round(total / 2), f"{sum(pruned.values())} of {total} weights are pruned, not half")
        return
    for name, number in pruned.items():
        wanted = round(plan.masks[name].numel() / 2)
        check(number == wanted, f"{name} lost {number} weights, not {wanted}")


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    return (
        one.shape == other.shape and one.dtype == other.dtype and bool(((one == other) | (one != one) & (other != other)).all())
    )


def unchanged(model: nn.Module, before: nn.Module, when: str, leave: Mapping[str, Any] = {}) -> None:
    """Checks that tensors, flags, hooks and gradients are those of the model before."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    old = {**dict(before.named_parameters()), **dict(before.named_buffers())}
    check({name for name, _ in tensors} == set(old), f"{when} the model has other tensors")
    for name, tensor in tensors:
        check(name in leave or bits(tensor.detach(), old[name].detach()), f"{when} {name} is another")
        check(tensor.requires_grad == old[name].requires_grad, f"{when} requires_grad of {name} is another")
        check(tensor.grad is None, f"{when} {name} has a gradient")
    for (name, module), same in zip(model.named_modules(), before.modules(), strict=True):
        for attribute in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs"):
            number = [len(getattr(one, attribute)) for one in (module, same)]
            check(number[0] == number[1], f"{when} {name} has {number[0]} of {attribute}")
        check(module.training == same.training, f"{when} {name} is in another mode")
        check(not name or vars(module).keys() == vars(same).keys(), f"{when} {name} has other attributes")  # it holds a record


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of two outputs, relative to the largest value of each tensor."""
    if [a.shape for a in found] != [b.shape for b in wanted]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True) if b.numel() and b.isfinite().all()]
    return max((float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs), default=0.0)


# ---------------------------------------------------------------- what layers are solved with


def recorded(
    own: nn.Module,
    dense: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    method: str,
    excluded: Sequence[str],
    answer: Answer,
) -> int:
    """Compares the evidence of each layer with what hooks see. Returns the number of layers that were compared."""
    import secateur as sc
    from secateur.methods import Method, Solution

    seen: dict[str, Any] = {}

    class Record(Method):
        needs: ClassVar[frozenset[str]] = frozenset({"gram", "cross"})
        rewrites: ClassVar[bool] = True

        def solve(self, problem: Any, pattern: Any, amount: Any, previous: Any) -> Any:
            seen[problem.name] = problem.H, problem.C
            mask = amount.keep(problem.name, problem.scores, pattern, previous)
            return Solution(mask, problem.W * mask * 1.1)

    before = copy.deepcopy(own)
    plan = sc.prune_(own, method=Record(), data=as_data(batches), exclude=list(excluded), **HOW[method])
    compared, inside = 0, inside_blocks(own, seen)
    for name, (H, C) in seen.items():
        holders = [name, "" if name in inside else "outside of blocks", *modules_of(name)]
        if any(re.search(OTHERWISE, plan.notes.get(holder, "")) for holder in holders):
            continue
        pairs = inputs_of(name, own, dense, batches)
        if pairs is not None:
            grams = sum(x.mT @ x for x, _ in pairs), sum((y - x).mT @ x for x, y in pairs)
            scale = max(float(grams[0].abs().max()), 1e-9)
            apart = [float((one.double() - plain).abs().max()) / scale for one, plain in zip((H, C), grams, strict=True)]
            check(apart[0] < CLOSE, f"{name} was solved with other inputs than hooks see: {apart[0]:.1e}")
            check(apart[1] < ROUNDED, f"{name} was solved with other dense inputs than hooks see: {apart[1]:.1e}")
        change = change_of(name, own, before, batches)
        if change is not None:
            wanted = squared_change(name, own, before, H)
            fits = abs(change - wanted) <= CLOSE * max(change, wanted, 1e-9)
            check(fits, f"the new {name} changes its output by {change:.4g}, and its Gram matrix gives {wanted:.4g}")
        compared += pairs is not None or change is not None
    answer.why = f"{compared} of {len(seen)} layers compared"
    return len(plan.notes)


def modules_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def inside_blocks(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The layers in the repeated blocks of a model; the others are outside of blocks."""
    from secateur.blocks import repeated_blocks

    blocks = repeated_blocks(model, names, lists=(nn.ModuleList, nn.Sequential))
    return {name for block in blocks if block.module is not model for name in block.names}


def inputs_of(
    name: str, own: nn.Module, dense: nn.Module, batches: Sequence[dict[str, Tensor]]
) -> list[tuple[Tensor, Tensor]] | None:
    """The inputs of a linear layer, in the pruned model and in the dense one; None where hooks do not tell."""
    path = name.rpartition(".")[0]
    if type(own.get_submodule(path)) is not nn.Linear:
        return None
    found = []
    for batch in batches:
        valid = padding(batch)
        pair = [calls_of(one, path, batch) for one in (own, dense)]
        if not pair[0] or [x.shape for x, _ in pair[0]] != [x.shape for x, _ in pair[1]]:
            return None
        rows = [[counted(x.double(), valid) for x, _ in calls] for calls in pair]
        if any(x is None for x in (*rows[0], *rows[1])):
            return None
        found.append((torch.cat(rows[0]), torch.cat(rows[1])))
    return found


def change_of(name: str, own: nn.Module, before: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float | None:
    """The squared change of a layer's output that its new weight causes, on the inputs that it gets in the pruned model."""
    path, _, attribute = name.rpartition(".")
    total, old = 0.0, before.get_submodule(path)
    if attribute != "weight" or len(list(old.parameters())) > 2:
        return None
    for batch in batches:
        valid, calls = padding(batch), calls_of(own, path, batch)
        if not calls or not all(isinstance(output, Tensor) for _, output in calls):
            return None
        for x, output in calls:
            with torch.no_grad():
                change = (output.double() - old(x).double()).square()
            rows = counted(change, valid)
            if rows is None:
                return None
            total += float(rows.sum())
    return total


def squared_change(name: str, own: nn.Module, before: nn.Module, H: Tensor) -> float:
    """The trace of D H D', where D is the change of a weight."""
    from secateur.targeting import targets

    layout = next(target.layout for target in targets(before, include=name)[0])
    D = layout.matrix((own.get_parameter(name) - before.get_parameter(name)).detach()).double()
    D = D.reshape(layout.groups if H.ndim == 3 else 1, -1, D.shape[-1])
    return float(((D @ H.double()) * D).sum())


def padding(batch: Mapping[str, Tensor]) -> Tensor | None:
    """True for the positions that count; None where all do."""
    mask = batch.get("attention_mask")
    return None if mask is None or bool(mask.all()) else mask.bool()


def counted(x: Tensor, valid: Tensor | None) -> Tensor | None:
    """The vectors of a tensor that are not at padded positions; None if it does not have these positions."""
    if valid is None:
        return x.flatten(0, -2)
    if x.shape[:2] == valid.shape:
        return x[valid].flatten(0, -2)
    return x[valid.flatten()] if x.ndim == 2 and len(x) == valid.numel() else None


def calls_of(model: nn.Module, path: str, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Any]]:
    """The input and the output of each call of a layer, while the model runs for evaluation."""
    calls: list[tuple[Tensor, Any]] = []
    flags = [module.training for module in model.modules()]

    def see(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args:
            calls.append((args[0].clone(), output.clone() if isinstance(output, Tensor) else output))

    handle = model.get_submodule(path).register_forward_hook(see)
    run(model.eval(), batch)
    handle.remove()
    for module, flag in zip(model.modules(), flags, strict=True):
        module.training = flag
    return calls


# ---------------------------------------------------------------- one process for each model


def work(build: Callable[[], Built], methods: Sequence[str]) -> dict[str, Answer] | str:
    """The answers for one model, or why it was not built."""
    try:
        model, inputs = build()
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:160]
    return examine(model, inputs, methods)


def sweep(
    models: Mapping[str, tuple[str, Callable[[], Built]]], methods: Sequence[str], jobs: int, limit: float
) -> Iterator[tuple[str, str, dict[str, Answer]]]:
    """(name, task, answers) of each model that can be built; prints a line for each."""
    calls = {name: (work, build, methods) for name, (_, build) in models.items()}
    for name, found, seconds in in_processes(calls, jobs, limit):
        task = models[name][0]
        if isinstance(found, str) and found.startswith("no answer"):
            found = {method: Answer("slow", found) for method in methods}
        elif isinstance(found, str) and found.startswith("the process"):
            found = {method: Answer("crash", found) for method in methods}
        if isinstance(found, str):
            print(f"{name:34} not built: {found}", flush=True)
            continue
        compared = found["inputs"].why if "inputs" in found and found["inputs"].verdict in ("ok", "partly") else ""
        cells = " ".join(f"{method} {answer.verdict:8}" for method, answer in found.items()) + compared
        print(f"{name:34} {task:24} {cells} {seconds:5.1f} s", flush=True)
        for method, answer in found.items():
            if answer.verdict not in ("ok", "partly"):
                print(f"    {method}: {answer.verdict}: {answer.why}", flush=True)
            for text, number in Counter(answer.left.values()).items():
                print(f"    {method}: {number} layers left out: {text}", flush=True)
        yield name, task, found


def summary(results: Sequence[tuple[str, str, dict[str, Answer]]], methods: Sequence[str]) -> None:
    rows = []
    for task in [*sorted({task for _, task, _ in results}), "all"]:
        for method in methods:
            own = [answers[method] for _, kind, answers in results if task in ("all", kind) and method in answers]
            counts = Counter(answer.verdict for answer in own)
            if own:
                rows.append([task, method, str(len(own)), *(str(counts[verdict]) for verdict in VERDICTS)])
    show(f"One-shot methods: {machine()}", ["task", "method", "models", *VERDICTS], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="globs over names: 'llama*,gpt*', 'timm/*'")
    parser.add_argument("--task", default="*", help="globs over tasks: 'causal_lm'")
    parser.add_argument("--method", default=",".join(HOW), help=f"some of {', '.join(HOW)}")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one model")
    options = parser.parse_args()
    methods = options.method.split(",")
    if unknown := [method for method in methods if method not in HOW]:
        sys.exit(f"--method {unknown[0]!r} is not one of {', '.join(HOW)}")
    torch.set_num_threads(1)
    begin = time.monotonic()
    with quiet():
        import secateur  # noqa: F401  (imported once, before the processes fork)

        models = {**kinds(), **images()}

    def chosen(name: str, task: str) -> bool:
        return match(name, options.only.split(",")) and match(task, options.task.split(","))

    models = {name: model for name, model in models.items() if chosen(name, model[0])}
    if not models:
        sys.exit(f"--only {options.only!r} --task {options.task!r} matches no model")
    summary(list(sweep(models, methods, options.jobs, options.limit)), methods)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
