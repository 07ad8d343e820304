"""The report of a ResNet-56 on CIFAR-10: channels cut, weights set to zero, layers packed, and nothing trained.

    python examples/report.py WEIGHTS CIFAR10 [--images 10000] [--out out/report.html] [--pictures FOLDER] ...

WEIGHTS is a safetensors file with the state dict of `ResNet` below; CIFAR10 is an .npz file with x_train, x_test (uint8 images,
channels last) and y_test. The accuracy is that of the first --images test images. --pictures takes screenshots of the report in
Chromium, for which it needs playwright; those in docs/images were taken with the font Inter installed. --blocks 3 is ResNet-20.
It takes about ten minutes on one thread.
"""

from __future__ import annotations

import argparse
import copy
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import secateur as sc

SWEPT = 2000  # test images for each point of the curve
SPARSITY = 0.4
CURVES: dict[str, dict[str, Any]] = {
    "unstructured": {"criterion": sc.magnitude, "scope": "global"},
    "Wanda": {"criterion": sc.wanda, "scope": "row"},
    "4x1 blocks": {"criterion": sc.magnitude, "pattern": "4x1", "scope": "global"},
}
POINTS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
RECIPE = """import secateur as sc

small, cut = sc.shrink(model, image, sc.reconstruction, flops=0.5, data=batches, refit=True)
plan = sc.prune_(small, sc.magnitude, sparsity=0.4, scope="global")
packed = sc.compress_(small, image)
sc.save(small, "out/resnet56", packed=True)
"""


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.pad = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class ResNet(nn.Module):
    """The ResNet for CIFAR of He et al. (2016), with shortcuts that pad with zeros; n = 9 is ResNet-56."""

    def __init__(self, n: int = 9) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(n)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), *(Block(32, 32, 1) for _ in range(n - 1)))
        self.layer3 = nn.Sequential(Block(32, 64, 2), *(Block(64, 64, 1) for _ in range(n - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def images(array: numpy.ndarray) -> Tensor:
    """The pixels as the weights were trained with them."""
    x = torch.from_numpy(array).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@torch.inference_mode()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(250), y.split(250)))
    return right / len(y)


def sweep(model: nn.Module, x: Tensor, y: Tensor, batches: list[Tensor], dense: float) -> dict[str, Any]:
    """The accuracy of the cut model with more and more zeros. Every model starts from the same weights."""
    start = accuracy(model, x, y)
    lines = []
    for label, how in CURVES.items():
        points = [{"sparsity": 0.0, "value": start}]
        for sparsity in POINTS:
            pruned = copy.deepcopy(model)
            plan = sc.prune_(pruned, how["criterion"], sparsity=sparsity, data=batches[:4], **_without(how, "criterion"))
            points.append({"sparsity": plan.metrics()["sparsity"], "value": accuracy(pruned, x, y)})
            if points[-1]["value"] < 0.4:
                break
        lines.append({"label": label, "points": points})
    pruned = copy.deepcopy(model)
    zeros = sc.prune_(pruned, pattern="2:4").metrics()["sparsity"]
    lines.append({"label": "2:4", "points": [{"sparsity": zeros, "value": accuracy(pruned, x, y)}]})
    return {"lines": lines, "dense": dense, "chosen": SPARSITY, "samples": len(y)}


def _without(how: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in how.items() if key != name}


def take_pictures(page: Path, folder: Path) -> None:
    """Screenshots: the first part of the page in light and dark, and a phone."""
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    views = {"light": (1280, 1.5), "dark": (1280, 1.5), "tablet": (800, 1), "phone": (390, 1.5)}  # width, pixels per point
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, scale) in views.items():
            size: Any = {"width": width, "height": 900}
            scheme: Any = "dark" if name == "dark" else "light"
            context = browser.new_context(viewport=size, device_scale_factor=scale, color_scheme=scheme)
            tab = context.new_page()
            tab.goto(page.resolve().as_uri())
            tab.locator("#plot").press("Home")
            for _ in range(33):
                tab.locator("#plot").press("ArrowRight")
            tab.locator("#plot").blur()
            bottom = tab.evaluate("document.querySelector('#readout').getBoundingClientRect().bottom + scrollY")
            clip: Any = {"x": 0, "y": 0, "width": width, "height": bottom + 24}
            tab.screenshot(path=folder / f"report-{name}.png", full_page=True, clip=clip)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("cifar10", type=Path)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--calibration", type=int, default=2000, help="training images that the cut is fitted to")
    parser.add_argument("--blocks", type=int, default=9, help="in each of the three parts of the network")
    parser.add_argument("--seconds", type=float, default=4.0, help="for which each model is timed")
    parser.add_argument("--out", type=Path, default=Path("out/report.html"))
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()

    model = ResNet(given.blocks)
    model.load_state_dict(load_file(given.weights))
    model.eval()
    with numpy.load(given.cifar10) as data:
        batches = list(images(data["x_train"][: given.calibration]).split(125))
        x, y = (
            images(data["x_test"][: given.images]),
            torch.from_numpy(data["y_test"][: given.images].reshape(-1).astype("int64")),
        )
    image = x[:1]

    small, cut = sc.shrink(model, image, sc.reconstruction, flops=0.5, data=batches, refit=True)
    shrunk = copy.deepcopy(small)
    plan = sc.prune_(small, sc.magnitude, sparsity=SPARSITY, scope="global")
    pruned = copy.deepcopy(small)
    packed = sc.compress_(small, image)

    few = min(SWEPT, len(y))
    report = sc.report(
        cut,
        plan,
        packed,
        path=given.out,
        stages={"dense": model, "shrunk": shrunk, "pruned": pruned, "compressed": small},
        example_inputs=image,
        other_inputs={"16 images": x[:16]},
        evaluate=lambda each: accuracy(each, x, y),
        samples=len(y),
        sweep=sweep(shrunk, x[:few], y[:few], batches, accuracy(model, x[:few], y[:few])),
        alternatives={
            "Blocks, 4x1": sc.plan(shrunk, pattern="4x1", sparsity=SPARSITY, scope="global"),
            "2:4": sc.plan(shrunk, pattern="2:4"),
        },
        name=f"ResNet-{6 * given.blocks + 2}",
        data="CIFAR-10",
        note=f"What remains was re-fitted to {given.calibration:,} training images, and nothing was trained.",
        recipe=RECIPE,
        seconds=given.seconds,
    )
    print(report)
    print(f"\nwrote {given.out}")
    if given.pictures:
        take_pictures(given.out, given.pictures)


if __name__ == "__main__":
    main()
