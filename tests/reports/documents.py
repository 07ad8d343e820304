"""Documents of reports, made by hand, for tests of the page."""

from dataclasses import replace

from secateur.reports.document import (
    Call,
    Document,
    Histogram,
    LayerRow,
    Line,
    Machine,
    Mask,
    Metric,
    Model,
    Point,
    Reason,
    StageFigures,
    Sweep,
    Time,
)

MACHINE = Machine("A processor", 2, 1, "3.11.7", "2.13.0", "0.1.0", load=0.5)
UGLY = [
    "</script><script>window.hacked = true</script>",
    '<img src=x onerror="window.hacked = true">',
    "a & b &lt; \"quoted\" 'twice' <!-- <script> ${x} {{ y }} %} \\ \u2028",
    "block." + "very_long_name_" * 13 + "end",
]


def layer(i: int, name: str | None = None, **changes) -> LayerRow:
    kept = 1200 + 7 * (i % 13)
    row = LayerRow(
        name=name or f"layer{1 + i // 20}.{i // 2 % 10}.conv{1 + i % 2}",
        kind="Conv2d",
        before=[16, 16, 3, 3],
        after=[12, 14, 3, 3],
        channels=[16, 12],
        kept=kept,
        pattern="unstructured",
        flops_before=4_718_592,
        flops_after=3_096_576,
        format="tiled 1" if i % 5 else "",
        dense_us=60.0 + i % 7,
        sparse_us=31.5 + i % 3 if i % 5 else None,
        bytes_before=9216,
        bytes_after=5000 + i,
        reason="" if i % 5 else "dense is faster here (tiled 4 was the best format)",
        hist=Histogram(0.3, [1, 4, 9, 4, 1], [1, 3, 0, 3, 1]),
    )
    return replace(row, **changes)


def metric(value: float) -> Metric:
    return Metric("accuracy", value, "%", value - 0.5, value + 0.5, 10_000)


def stage(name: str, how: str, share: float, value: float) -> StageFigures:
    times = [Time(words, base * share, 0.95 * base * share, 0.97 * base * share, 1.1 * base * share, 500) for words, base in
             (("one image", 0.0075), ("16 images", 0.0467))]  # fmt: skip
    return StageFigures(name, how, int(853_018 * share), int(800_000 * share), int(250_971_392 * share), int(3_521_096 * share),
                 metric(value), times)  # fmt: skip


def document(count: int = 40, **changes) -> Document:
    """A document with every section."""
    rows = [layer(i) for i in range(count)]
    line = Line("unstructured", [Point(0.0, 91.1), Point(0.4, 90.3), Point(0.6, 85.8), Point(0.8, 19.9)])
    made = Document(
        model=Model("ResNet", "ResNet-56", "CIFAR-10", [1, 3, 32, 32], False, "float32"),
        layers=rows,
        machine=MACHINE,
        made="2026-11-16 05:10 UTC",
        note="Nothing was trained.",
        stages=[
            stage("dense", "", 1.0, 93.4),
            stage("shrunk", "sc.shrink", 0.7, 91.1),
            stage("pruned", "sc.prune_", 0.6, 90.5),
            stage("compressed", "sc.compress_", 0.5, 90.3),
        ],
        steps=[
            Call("shrink", "magnitude, flops=0.5", {"flops": 0.5, "params": 0.7, "groups": 8.0, "exact": 6.0, "blocks": 0.0}),
            Call("prune_", "abs(weight), sparsity 0.4", {"sparsity": 0.4, "rewritten": 0.0}),
            Call("compress_", "objective=speed, 1 thread", {"compressed": 0.8 * count, "layers": float(count)}),
        ],
        reasons=[
            Reason("Axes that kept their size", "shrink", "the model returns it", ["linear.weight[0]", "linear.bias[0]"]),
            Reason("Groups that were cut, but not exactly", "shrink", "a constant meets padding", ["layer1.0.conv1.weight[0]"]),
            Reason("Layers that stay dense", "compress_", "dense is faster here", [row.name for row in rows if not row.format]),
        ],
        masks=[Mask("2:4", rows[0].name, 4, 8, "01100110" * 4, 0.5), Mask("4x1", rows[-1].name, 4, 8, "11001100" * 4, 0.5)],
        sweep=Sweep([line, Line("2:4", [Point(0.5, 38.1)])], 93.0, 0.4, 2000, "accuracy", "%"),
        recipe="import secateur as sc\n\nsmall, cut = sc.shrink(model, image, flops=0.5)\n",
    )
    return replace(made, **changes)


def bare(count: int = 3) -> Document:
    """A document with the fields that must be there, and nothing else."""
    rows = [LayerRow(f"fc{i}", "Linear", [8, 8], [8, 8], [8, 8], 32, "2:4") for i in range(count)]
    return Document(Model("", "Model"), rows, MACHINE)


def large(count: int = 1000) -> Document:
    """A language model with many layers, of which twelve have a histogram."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
             "mlp.down_proj")  # fmt: skip
    names = [f"model.layers.{i // len(parts)}.{parts[i % len(parts)]}" for i in range(count - 1)] + ["lm_head"]
    rows = [layer(i, name, hist=layer(i).hist if i % (count // 12) == 0 else None) for i, name in enumerate(names)]
    skipped = Reason("Tensors that were not pruned", "prune_", "a vector", [f"{name}.bias" for name in names])
    return document(count, layers=rows, reasons=[skipped])
