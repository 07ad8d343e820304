"""Writes the golden files of this version: small models, saved once and kept, so that later versions stay able to load them.

Run it only for a new version of the format, into a new folder: `python tests/golden/write.py tests/golden/v2`. Names after the
folder: only these, for what a version learned to store later.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import secateur as sc
from secateur.execute import Compressed
from secateur.execute.formats import FORMATS
from secateur.io import save
from secateur.surgery import shrink


class Block(nn.Module):
    def __init__(self, place: int):
        super().__init__()
        self.place, self.up, self.down = place, nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(torch.sigmoid(self.up(x)))


class Net(nn.Module):
    """Blocks between two layers, with a tied pair and a buffer."""

    def __init__(self):
        super().__init__()
        self.num_blocks = 4
        self.first, self.blocks, self.last = nn.Linear(40, 6), nn.ModuleList(map(Block, range(4))), nn.Linear(6, 40, bias=False)
        self.tied = nn.Linear(40, 6, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        x = self.first(x)
        for i in range(self.num_blocks):
            x = self.blocks[i](x)
        return self.last(x) * self.scale + self.tied.weight.sum()


def build() -> nn.Module:
    """Weights from a formula: the same in every version of torch."""
    model = Net().double()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()).double() * 1.7 + k).view_as(parameter))
    return model.eval()


def build_float() -> nn.Module:
    """The same in float32, which formats for compressed layers can hold."""
    return build().float()


class FiveLayers(nn.Module):
    """A layer for each format that was renamed after the first files were written, in float32."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = nn.Linear(40, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.relu(layer(x))
        return self.e(x) * self.scale


def build_five() -> nn.Module:
    model = FiveLayers()
    with torch.no_grad():
        for k, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()).double() * 1.7 + k).view_as(parameter))
    return model.eval()


BUILD = {"compressed": build_float, "formats": build_five}  # the rest: build


def inputs() -> torch.Tensor:
    return torch.cos(torch.arange(120).double()).view(3, 40)


def compressed() -> nn.Module:
    model = build_float()
    sc.prune_(model, sparsity=0.9)
    first, up, last = FORMATS["tiled"], FORMATS["bitmask"], FORMATS["csr"]
    model.first = Compressed(model.first, first, (1,), ("first.weight", "tied.weight"))
    model.blocks[0].up = Compressed(model.blocks[0].up, up, ())
    model.last = Compressed(model.last, last, (), store=torch.bfloat16)
    return model.eval()


FIVE = {
    "a": ("amx_tiles", ()),
    "b": ("sparse24_mma", ()),
    "c": ("padded_rows", ()),
    "d": ("dense_blocks", (64,)),
    "e": ("input_sparse", ()),
}


def formats() -> nn.Module:
    model = build_five()
    sc.prune_(model, sparsity=0.9, exclude=["b.weight"])
    sc.prune_(model, pattern="2:4", include=["b.weight"])
    for name, (form, options) in FIVE.items():
        setattr(model, name, Compressed(getattr(model, name), FORMATS[form], options))
    return model.eval()


def models() -> dict[str, tuple[nn.Module, bool]]:
    """Name -> the model, and whether it is saved packed."""
    pruned = build()
    sc.prune_(pruned, sparsity=0.9)
    narrow, _ = shrink(build(), inputs(), channels=0.5, exclude=["first*", "last*"])
    shallow, _ = shrink(build(), inputs(), depth=0.5)
    twice, _ = shrink(shallow, inputs(), channels=0.5, exclude=["first*", "last*"])
    return {
        "dense": (build(), False),
        "pruned": (pruned, False),
        "packed": (pruned, True),
        "narrow": (narrow, False),
        "shallow": (shallow, False),
        "twice": (twice, True),
        "compressed": (compressed(), False),
        "formats": (formats(), False),
    }


if __name__ == "__main__":
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    answers = folder / "expected.json"
    expected = json.loads(answers.read_text()) if only else {}
    for name, (model, pack) in models().items():
        if not only or name in only:
            save(model, folder / name, packed=pack)
            expected[name] = model(inputs().to(model.scale)).tolist()
    answers.write_text(json.dumps(expected, indent=1))
