"""Draws the pictures of docs/images that come from the package itself: what patterns, scopes and a cut keep of matrices.

python docs/_pictures.py
"""

from pathlib import Path

import torch
from torch import nn

import secateur as sc

ROWS, COLUMNS, CELL = 8, 16, 11
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1b1f1d }
.kept { fill: #1d7a4c } .zero { fill: none; stroke: #858d88; stroke-opacity: .5 }
@media (prefers-color-scheme: dark) { text { fill: #e8ebe8 } .kept { fill: #5fc490 } }
</style>"""


def grid(mask: torch.Tensor, title: str, left: int, top: int) -> str:
    cells = [f'<text x="{left}" y="{top - 8}">{title}</text>']
    for row, column in torch.cartesian_prod(*map(torch.arange, mask.shape)).tolist():
        kind = "kept" if mask[row, column] else "zero"
        x, y = left + column * CELL, top + row * CELL
        cells.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}"/>')
    return "".join(cells)


def picture(name: str, label: str, panels: dict[str, dict]) -> None:
    width, height = COLUMNS * CELL + 28, ROWS * CELL + 40
    parts = []
    for i, (title, options) in enumerate(panels.items()):
        torch.manual_seed(3)
        layer = nn.Linear(COLUMNS, ROWS, bias=False)
        layer.weight.data *= torch.linspace(0.3, 1, ROWS)[:, None]  # rows of different size, so that scopes differ
        (mask,) = sc.plan(layer, **options).masks.values()
        parts.append(grid(mask, title, 4 + i % 3 * width, 24 + i // 3 * height))
    write(name, label, parts, 3 * width - 20, -(-len(panels) // 3) * height - 8)


def cut(name: str, label: str) -> None:
    """What `shrink` keeps of the tensors around one group of channels, as matrices of outputs and inputs."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(10, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1)).eval()
    _, plan = sc.shrink(model, torch.randn(1, 10, 4, 4), channels={"0": 6 / 8})
    parts, left = [], 4
    for title, tensor, columns in (
        ("conv1.weight", "0.weight", 10),
        ("norm.weight", "1.weight", 1),
        ("conv2.weight", "3.weight", 8),
    ):
        shape, kept = plan.cuts.shapes[tensor], plan.cuts.tensors[tensor]
        mask = torch.zeros(shape[0], columns, dtype=torch.bool)
        rows, inputs = kept.get(0, range(shape[0])), kept.get(1, range(columns))
        mask[torch.tensor(list(rows))[:, None], torch.tensor(list(inputs))] = True
        parts.append(grid(mask, title, left, 24))
        left += max(columns * CELL, 90) + 28
    write(name, label, parts, left - 20, ROWS * CELL + 32)


def write(name: str, label: str, parts: list[str], width: int, height: int) -> None:
    size = f"0 0 {width} {height}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}">'
    text = f"{head}{STYLE}{''.join(parts)}</svg>\n"
    (Path(__file__).parent / "images" / f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    half = {"sparsity": 0.5}
    patterns = ("unstructured", "2:4", "1x4", "4x4", "out", "in")
    kept = {p: {"pattern": p, **({} if ":" in p else half)} for p in patterns}
    picture("patterns", "One matrix of 8 outputs and 16 inputs, half pruned by six patterns; filled cells are kept", kept)
    scopes = {'scope="tensor"': {"scope": "tensor", **half}, 'scope="row"': {"scope": "row", **half}}
    picture(
        "scopes", "The same matrix, half pruned; with scope tensor all weights compete, with scope row those of a row", scopes
    )
    cut(
        "groups",
        "Two channels are removed: rows of the first weight, entries of the normalisation, columns of the second weight",
    )
