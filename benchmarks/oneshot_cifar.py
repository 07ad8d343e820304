"""One-shot pruning of the weights of ResNet-56 on CIFAR-10: top-1 with re-estimated BatchNorm statistics, without training.

    python benchmarks/oneshot_cifar.py DATA MODELS [TEST_IMAGES] [CALIBRATION_IMAGES]

DATA and MODELS are those of shrink_cifar.py. Calibration takes the first training images, cropped and flipped at random as in
training; they also give the statistics. The convolutions but the first are pruned. Times are processor seconds of pruning.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import numpy
from _bench import machine, show
from safetensors.torch import load_file
from shrink_cifar import BATCH, BLOCKS, augmented, nets_of

import secateur as sc
from secateur.surgery.calibrate.norms import reestimate_

DEPTH = 56
PATTERNS: dict[str, dict[str, Any]] = {"90%": {"sparsity": 0.9}, "2:4": {"pattern": "2:4"}}
ROWS: dict[str, dict[str, Any]] = {
    "magnitude": {"criterion": sc.magnitude},
    "magnitude, global": {"criterion": sc.magnitude, "scope": "global"},
    "SparseGPT": {"method": "sparsegpt"},
    "flow": {"method": "flow"},
    "loss": {"method": "loss"},
}


def main(data: Path, models: Path, tested: int = 10_000, calibrated: int = 500) -> None:
    print(machine())
    nets = nets_of(models)
    with numpy.load(data / "cifar10.npz") as arrays:
        batches = list(augmented(nets.cifar_images(arrays["x_train"][:calibrated])).split(BATCH))
        x, y = nets.cifar_images(arrays["x_test"][:tested]), arrays["y_test"][:tested]
    dense = nets.CifarResNet(BLOCKS[DEPTH])
    dense.load_state_dict(load_file(models / f"resnets/resnet{DEPTH}.safetensors"))
    dense.eval()
    rows = [("dense", "", "", f"{nets.top1(dense, x, y):.2f}", "")]
    for name, amount in PATTERNS.items():
        for row, how in ROWS.items():
            if "pattern" in amount and "scope" in how:
                continue
            model, begin = copy.deepcopy(dense), time.process_time()
            plan = sc.prune_(model, **how, **amount, include="layer*.conv*", data=batches)
            took = time.process_time() - begin
            reestimate_(model, batches)
            found = nets.top1(model, x, y)
            rows.append((row, name, f"{plan.metrics()['sparsity']:.2%}", f"{found:.2f}", f"{took:.1f} s"))
            print(*rows[-1], file=sys.stderr, flush=True)
    title = f"ResNet-{DEPTH} on CIFAR-10, {calibrated} calibration images, top-1 in % on {len(x):,} test images"
    show(title, ("method", "pruned", "zeros", "re-estimated", "time"), rows)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
