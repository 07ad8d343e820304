"""One-shot structured pruning of CIFAR-10 ResNets without training: top-1 as cut, with new statistics, with the re-fit.

    python benchmarks/shrink_cifar.py DATA MODELS [TEST_IMAGES] [CALIBRATION_IMAGES]

DATA is a folder with cifar10.npz (x_train, y_train, x_test, y_test: uint8 images, channels last). MODELS is a folder with
nets.py (CifarResNet, cifar_images, top1) and resnets/resnet20.safetensors, resnets/resnet56.safetensors. Calibration takes the
first training images, cropped and flipped at random as in training. With torch-pruning installed, its best of six criteria is
printed next to ours, each cell the best for that cell.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from _bench import machine, show
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from secateur.graph import Trace, trace
from secateur.surgery.masked import make
from secateur.surgery.reconstruct import keep_for_flops, unit_errors
from secateur.surgery.refit import reestimate_, refit_

BLOCKS = {20: 3, 56: 9}
TARGETS = {"1.5x": 1 / 1.5, "2x": 1 / 2}
BATCH = 125
STEPS = 100  # in which the peer goes from all to almost nothing


def augmented(images: Tensor, seed: int = 0) -> Tensor:
    """Random crops with padding 4, and flips."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.randint(0, 9, (len(images), 2), generator=draw).tolist()
    flips = (torch.rand(len(images), generator=draw) < 0.5).tolist()
    padded = F.pad(images, (4, 4, 4, 4))
    crops = [p[:, top : top + 32, left : left + 32] for p, (top, left) in zip(padded, places)]
    return torch.stack([c.flip(-1) if flip else c for c, flip in zip(crops, flips)])


def cut(traced: Trace, scores: Any, remains: float, example: Tensor) -> Any:
    return make(traced.model, traced, keep_for_flops(traced, scores, remains), (example,), {})


def flops(model: nn.Module, example: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops()


def ours(model: nn.Module, batches: list[Tensor], test: Callable[[nn.Module], float]) -> list[list[str]]:
    """A row for each target and criterion: what the cut model gets right as it is, re-estimated, and fitted."""
    example = batches[0][:1]
    traced = trace(model, example)
    groups = [g for g in traced.prunable if sum(m.role == "consume" for m in g.members) == 1]
    whole, rows = flops(model, example), []
    for name, refit in (("error", False), ("error after fit", True)):
        begin = time.perf_counter()
        scores, _ = unit_errors(traced, groups, batches, refit=refit)
        scored = time.perf_counter() - begin
        for label, remains in TARGETS.items():
            made = cut(traced, scores, remains, example)
            left = flops(made.small, example) / whole
            plain, fitted = test(made.small), copy.deepcopy(made)
            begin = time.perf_counter()
            refit_(fitted.small, model, fitted.cuts, batches)
            seconds = time.perf_counter() - begin
            reestimate_(made.small, batches)
            cells = [plain, test(made.small), test(fitted.small)]
            rows.append(
                [label, f"secateur, {name}", f"{left:.3f}", *(f"{c:.2f}" for c in cells), f"{scored:.0f} + {seconds:.0f} s"]
            )
            print("  ", *rows[-1], file=sys.stderr, flush=True)
    return rows


def peers(model: nn.Module, batches: list[Tensor], labels: Tensor, test: Callable[[nn.Module], float]) -> list[list[str]]:
    """Torch-Pruning's six criteria, global and local, on the same layers at the same FLOPs; the best of each column."""
    import torch_pruning as tp  # type: ignore[import-not-found]

    example, rows = batches[0][:1], []
    whole = flops(model, example)
    importances = {
        "L1": lambda: tp.importance.MagnitudeImportance(p=1),
        "L2": lambda: tp.importance.MagnitudeImportance(p=2),
        "BN scale": tp.importance.BNScaleImportance,
        "FPGM": tp.importance.FPGMImportance,
        "LAMP": tp.importance.LAMPImportance,
        "Taylor": tp.importance.TaylorImportance,
    }
    for label, remains in TARGETS.items():
        best = {"plain": (0.0, ""), "reestimated": (0.0, "")}
        shares: list[float] = []
        for name, make_importance in importances.items():
            for everywhere in (False, True):
                small = copy.deepcopy(model)
                for p in small.parameters():
                    p.requires_grad_(True)
                outer = [small.conv1, small.linear, *(m for n, m in small.named_modules() if n.endswith("conv2"))]
                pruner = tp.pruner.BasePruner(
                    small, example, importance=make_importance(), global_pruning=everywhere, iterative_steps=STEPS,
                    pruning_ratio=0.95, max_pruning_ratio=0.95, ignored_layers=outer,
                )  # fmt: skip
                while flops(small, example) > remains * whole and pruner.current_step < STEPS:
                    if name == "Taylor":
                        small.zero_grad()
                        at = pruner.current_step % len(batches)
                        F.cross_entropy(small(batches[at]), labels[at * BATCH :][:BATCH]).backward()
                    pruner.step()
                shares.append(flops(small, example) / whole)
                small.eval()
                plain = test(small)
                reestimate_(small, batches)
                for column, value in (("plain", plain), ("reestimated", test(small))):
                    best[column] = max(best[column], (value, f"{name}{', global' if everywhere else ''}"))
                print("  ", label, name, everywhere, f"{shares[-1]:.3f}", plain, file=sys.stderr, flush=True)
        names = " / ".join(best[c][1] for c in best)
        rows.append([label, f"torch-pruning, {names}", f"{min(shares):.3f}", *(f"{v:.2f}" for v, _ in best.values()), "", ""])
    return rows


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    data, models = Path(sys.argv[1]) / "cifar10.npz", Path(sys.argv[2])
    tested, calibrated = (int(a) for a in (*sys.argv[3:5], *("10000", "2000")[len(sys.argv) - 3 :]))
    for path in (data, models / "nets.py", *(models / f"resnets/resnet{n}.safetensors" for n in BLOCKS)):
        if not path.exists():
            raise SystemExit(f"{path} is not there; see the first lines of this file for what goes where")
    spec = importlib.util.spec_from_file_location("nets", models / "nets.py")
    assert spec is not None
    assert spec.loader is not None
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    with numpy.load(data) as arrays:
        images = augmented(nets.cifar_images(arrays["x_train"][:calibrated]))
        labels = torch.as_tensor(arrays["y_train"][:calibrated]).long()
        x, y = nets.cifar_images(arrays["x_test"][:tested]), arrays["y_test"][:tested]
    peer = importlib.util.find_spec("torch_pruning") is not None
    print(machine(), f"{len(x)} test images, {len(images)} calibration images", sep="\n")
    for depth, blocks in BLOCKS.items():
        model = nets.CifarResNet(blocks)
        model.load_state_dict(load_file(models / f"resnets/resnet{depth}.safetensors"))
        model.eval()
        batches = list(images.split(BATCH))

        def test(m: nn.Module) -> float:
            return nets.top1(m, x, y)

        dense = test(model)
        rows = ours(model, batches, test) + (peers(model, batches, labels, test) if peer else [])
        rows = [row for label in TARGETS for row in rows if row[0] == label]
        title = f"ResNet-{depth} on CIFAR-10, dense {dense:.2f} % top-1" + ("" if peer else "; torch-pruning is not installed")
        show(title, ("fewer FLOPs", "how", "FLOPs left", "as cut", "re-estimated", "re-fitted", "score + fit"), rows)


if __name__ == "__main__":
    main()
