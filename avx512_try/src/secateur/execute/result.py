"""What compression did, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .._tree import nearest
from .find import Zeros
from .timing import spell


@dataclass(frozen=True)
class Row:
    """One layer: the pattern found, the format chosen or the reason why not, seconds per call of the model, bytes."""

    layer: str
    kind: str
    pattern: str = ""
    sparsity: float = 0.0
    format: str | None = None
    dense_seconds: float | None = None
    sparse_seconds: float | None = None
    before: int = 0
    after: int = 0
    reason: str = ""

    def found(self, zeros: Zeros) -> Row:
        return replace(self, pattern=zeros.pattern, sparsity=zeros.sparsity)

    def left(self, reason: str) -> Row:
        """Dense, and why. Times stay, to be read; the format that lost is named in the reason."""
        lost = f" ({self.format} was the best of the others)" if self.format else ""
        return replace(self, format=None, reason=reason + lost, after=self.before)

    def timed(self, form: str, options: Sequence[int], dense: float | None, sparse: float | None, size: int) -> Row:
        name = form + (f" {'x'.join(map(str, options))}" if options else "")
        return replace(self, format=name, dense_seconds=dense, sparse_seconds=sparse, after=size)

    def as_twin(self, other: Row) -> Row:
        """This row's decision and times for another layer of the same shape, pattern and inputs."""
        after = self.after if self.format else other.before
        reason = self.reason or f"measured on {self.layer}"
        return replace(self, layer=other.layer, sparsity=other.sparsity, before=other.before, after=after, reason=reason)


@dataclass(frozen=True)
class Compression:
    """One row for each layer. `print` shows the table."""

    rows: list[Row]
    objective: str
    threads: int
    before: int  # bytes of the weights of these layers, a shared one counted once
    after: int

    def __getitem__(self, layer: str) -> Row:
        for row in self.rows:
            if row.layer == layer:
                return row
        raise KeyError(f"no layer {layer!r} in this table.{nearest(layer, [row.layer for row in self.rows])}")

    @property
    def compressed(self) -> list[str]:
        """The layers that are in a sparse format now."""
        return [row.layer for row in self.rows if row.format]

    @property
    def speedup(self) -> float:
        """Dense time over the time now, of all the layers that were measured."""
        timed = [row for row in self.rows if row.dense_seconds is not None]
        now = sum((row.sparse_seconds if row.format else row.dense_seconds) or 0.0 for row in timed)
        return sum(row.dense_seconds or 0.0 for row in timed) / now if now else 1.0

    def __str__(self) -> str:
        head = ("layer", "kind", "zeros", "pattern", "format", "dense", "sparse", "ratio", "bytes", "now", "")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        right = {2, 5, 6, 7, 8, 9}
        table = [
            "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines
        ]
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        end = (
            f"{len(self.compressed)} of {len(self.rows)} layers compressed for {self.objective}, {threads}: "
            f"{self.before:,} bytes of weights are now {self.after:,}; measured layers {self.speedup:.2f}x"
        )
        return "\n".join([*(line.rstrip() for line in table), end])


def _cells(row: Row) -> tuple[str, ...]:
    dense, sparse = row.dense_seconds, row.sparse_seconds
    return (
        row.layer,
        row.kind,
        f"{row.sparsity:.1%}",
        row.pattern,
        row.format or "dense",
        spell(dense) if dense is not None else "",
        spell(sparse) if sparse is not None else "",
        f"{dense / sparse:.2f}x" if dense is not None and sparse else "",
        f"{row.before:,}",
        f"{row.after:,}",
        row.reason,
    )
