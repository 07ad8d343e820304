"""One-shot structured pruning of CIFAR-10 ResNets without training: top-1 as cut, with new statistics, with the re-fit.

    python benchmarks/shrink_cifar.py DATA MODELS [TEST_IMAGES] [CALIBRATION_IMAGES] [DEPTH ...]

DATA is a folder with cifar10.npz (x_train, y_train, x_test, y_test: uint8 images, channels last). MODELS is a folder with
nets.py (CifarResNet, cifar_images, top1) and resnets/resnet20.safetensors, resnets/resnet56.safetensors. DEPTH is 20 or 56, and
both if it is left out. Calibration takes the first training images, cropped and flipped at random as in training. With
torch-pruning installed, its best of six criteria (global and local) is printed next to ours, each cell the best for that cell;
its statistics are those of the calibration images, ours the dense model's, moved by what the cut changes on these images.

max_error compares our model as cut with the masked one, in which removed channels are zero (`plan.verify`). "masked, biases
kept" is the full-size model with zeros in the filters of these channels only: BatchNorm turns the channels into constants that
cannot be folded into biases next to zero padding. The row shows the accuracy with these constants.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from _bench import machine, show
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from secateur.surgery import shrink
from secateur.surgery.calibrate.norms import reestimate_
from secateur.surgery.calibrate.reconstruct import reconstruction

BLOCKS = {20: 3, 56: 9}
TARGETS = {"1.5x": 1 / 1.5, "2x": 1 / 2}
REPAIRS: dict[str, dict[str, Any]] = {"as cut": {}, "re-estimated": {"reestimate": True}, "re-fitted": {"refit": True}}
SCREENED, FINALISTS = 1000, 3  # the peer's criteria are tried on so many test images; the best of each column on all
BATCH = 125
STEPS = 100  # in which the peer goes from all to almost nothing


def nets_of(models: Path) -> Any:
    """The module nets.py in the folder of models."""
    spec = importlib.util.spec_from_file_location("nets", models / "nets.py")
    assert spec is not None
    assert spec.loader is not None
    nets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nets)
    return nets


def augmented(images: Tensor, seed: int = 0) -> Tensor:
    """Random crops with padding 4, and flips."""
    draw = torch.Generator().manual_seed(seed)
    places = torch.randint(0, 9, (len(images), 2), generator=draw).tolist()
    flips = (torch.rand(len(images), generator=draw) < 0.5).tolist()
    padded = F.pad(images, (4, 4, 4, 4))
    crops = [p[:, top : top + 32, left : left + 32] for p, (top, left) in zip(padded, places)]
    return torch.stack([c.flip(-1) if flip else c for c, flip in zip(crops, flips)])


def flops(model: nn.Module, example: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops()


def ours(model: nn.Module, batches: list[Tensor], test: Callable[[nn.Module], float]) -> list[list[str]]:
    """A row for each target: what the cut model gets right, each cell with the units chosen for its repair."""
    rows = []
    for label, remains in TARGETS.items():
        cells, left, seconds, error, kept = [], 0.0, [], 0.0, 0.0
        for name, repair in REPAIRS.items():
            begin = time.perf_counter()
            small, plan = shrink(model, batches[0][:1], reconstruction, flops=remains, data=batches, **repair)
            seconds.append(time.perf_counter() - begin)
            left = max(left, plan.metrics()["flops"])
            cells.append(test(small))
            if not repair:
                error, kept = plan.verify().max_error, test(with_zero_filters(model, plan.cuts.tensors))
            print("  ", label, name, cells[-1], f"{seconds[-1]:.0f} s", file=sys.stderr, flush=True)
        took = " / ".join(f"{s:.0f}" for s in seconds) + " s"
        rows.append([label, "secateur, reconstruction", f"{left:.3f}", *(f"{c:.2f}" for c in cells), f"{error:.1e}", took])
        rows.append([label, "masked, biases kept", "1.000", f"{kept:.2f}", "", "", "", ""])
    return rows


def with_zero_filters(model: nn.Module, kept: dict[str, dict[int, list[int]]]) -> nn.Module:
    """A copy of the model in which the filters that produce removed channels are zero; nothing else changes."""
    model = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if weight.dim() == 4 and 0 in kept.get(name, {}):
            gone = torch.ones(len(weight), dtype=torch.bool)
            gone[kept[name][0]] = False
            weight.data[gone] = 0
    return model


def peers(model: nn.Module, batches: list[Tensor], labels: Tensor, test: Callable[..., float]) -> list[list[str]]:
    """Torch-Pruning's six criteria, global and local, on the same layers at the same FLOPs; the best of each column."""
    import torch_pruning as tp  # type: ignore[import-not-found]

    importances: dict[str, Callable[[], Any]] = {
        "L1": lambda: tp.importance.MagnitudeImportance(p=1),
        "L2": lambda: tp.importance.MagnitudeImportance(p=2),
        "BN scale": tp.importance.BNScaleImportance,
        "FPGM": tp.importance.FPGMImportance,
        "LAMP": tp.importance.LAMPImportance,
        "Taylor": tp.importance.TaylorImportance,
    }
    whole, rows = flops(model, batches[0][:1]), []
    made: dict[str, list[nn.Module]] = {}
    for name, everywhere in product(importances, (False, True)):
        how = f"{name}{', global' if everywhere else ''}"
        made[how] = peer(tp, model, importances[name](), everywhere, [r * whole for r in TARGETS.values()], batches, labels)
    for number, label in enumerate(TARGETS):
        small = {how: models[number] for how, models in made.items()}
        least = min(flops(m, batches[0][:1]) for m in small.values()) / whole
        cells, names = [], []
        for column in ("as cut", "re-estimated"):
            if column == "re-estimated":
                for m in small.values():
                    reestimate_(m, batches)
            tried = sorted(small, key=lambda how: -test(small[how], SCREENED))[:FINALISTS]
            value, how = max((test(small[how]), how) for how in tried)
            cells.append(f"{value:.2f}")
            names.append(how)
            print("  ", label, "torch-pruning", column, how, value, file=sys.stderr, flush=True)
        rows.append([label, f"torch-pruning, {' / '.join(names)}", f"{least:.3f}", *cells, "", "", ""])
    return rows


def peer(
    tp: Any, model: nn.Module, importance: Any, everywhere: bool, limits: list[float], batches: list[Tensor], labels: Tensor
) -> list[nn.Module]:
    """Cut step by step; a copy as soon as the FLOPs are within each limit, the largest first."""
    small: Any = copy.deepcopy(model)
    for p in small.parameters():
        p.requires_grad_(True)
    outer = [small.conv1, small.linear, *(m for n, m in small.named_modules() if n.endswith("conv2"))]
    pruner = tp.pruner.BasePruner(
        small, batches[0][:1], importance=importance, global_pruning=everywhere, iterative_steps=STEPS,
        pruning_ratio=0.95, max_pruning_ratio=0.95, ignored_layers=outer,
    )  # fmt: skip
    found: list[nn.Module] = []
    for most in limits:
        while flops(small, batches[0][:1]) > most and pruner.current_step < STEPS:
            if isinstance(importance, tp.importance.TaylorImportance):
                small.zero_grad()
                at = pruner.current_step % len(batches)
                F.cross_entropy(small(batches[at]), labels[at * BATCH :][:BATCH]).backward()
            pruner.step()
        small.zero_grad()
        found.append(copy.deepcopy(small).eval())
    return found


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    data, models = Path(sys.argv[1]) / "cifar10.npz", Path(sys.argv[2])
    tested, calibrated = (int(a) for a in (*sys.argv[3:5], *("10000", "2000")[len(sys.argv) - 3 :]))
    depths = [int(a) for a in sys.argv[5:]] or list(BLOCKS)
    for path in (data, models / "nets.py", *(models / f"resnets/resnet{n}.safetensors" for n in depths)):
        if not path.exists():
            raise SystemExit(f"{path} is not there; see the first lines of this file for what goes where")
    nets = nets_of(models)
    with numpy.load(data) as arrays:
        images = augmented(nets.cifar_images(arrays["x_train"][:calibrated]))
        labels = torch.as_tensor(arrays["y_train"][:calibrated]).long()
        x, y = nets.cifar_images(arrays["x_test"][:tested]), arrays["y_test"][:tested]
    peer = importlib.util.find_spec("torch_pruning") is not None
    print(machine(), f"{len(x)} test images, {len(images)} calibration images", sep="\n")
    for depth in depths:
        model = nets.CifarResNet(BLOCKS[depth])
        model.load_state_dict(load_file(models / f"resnets/resnet{depth}.safetensors"))
        model.eval()
        batches = list(images.split(BATCH))

        def test(m: nn.Module, images: int = len(x)) -> float:
            return nets.top1(m, x[:images], y[:images])

        dense = test(model)
        rows = ours(model, batches, test) + (peers(model, batches, labels, test) if peer else [])
        rows = [row for label in TARGETS for row in rows if row[0] == label]
        title = f"ResNet-{depth} on CIFAR-10, dense {dense:.2f} % top-1" + ("" if peer else "; torch-pruning is not installed")
        show(title, ("fewer FLOPs", "how", "FLOPs left", *REPAIRS, "max_error", "to shrink"), rows)


if __name__ == "__main__":
    main()
