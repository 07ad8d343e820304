"""`Compression`, the result of `compress_`: a table with one row per layer, its numbers, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from .._tree import nearest
from ..display import Reported, Table, format_seconds
from .find import Zeros
from .layers import Compressed
from .restore import restore_


@dataclass(frozen=True)
class LayerResult:
    """One layer: the pattern of its zeros, the chosen format or the reason to stay dense, seconds per model call, bytes."""

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
    error: float | None = None  # of values in fewer bits: norm of the change of the output over the norm of the output

    def found(self, zeros: Zeros) -> LayerResult:
        return replace(self, pattern=zeros.pattern, sparsity=zeros.sparsity)

    def left(self, reason: str) -> LayerResult:
        """Marks the layer as dense, with the reason. It keeps the measured times and names the best format in the reason."""
        best = f" ({self.format} was the best format)" if self.format else ""
        return replace(self, format=None, reason=reason + best, after=self.before, error=None)

    def timed(self, form: str, options: Sequence[int], dense: float | None, sparse: float | None, size: int) -> LayerResult:
        name = form + (f" {'x'.join(map(str, options))}" if options else "")
        return replace(self, format=name, dense_seconds=dense, sparse_seconds=sparse, after=size)

    def as_twin(self, other: LayerResult) -> LayerResult:
        """Returns this row's decision and times for another layer of the same shape, pattern and inputs."""
        after = self.after if self.format else other.before
        reason = self.reason or f"measured on {self.layer}"
        return replace(self, layer=other.layer, sparsity=other.sparsity, before=other.before, after=after, reason=reason)


@dataclass(frozen=True)
class Compression(Reported):
    """What `compress_` did, one row per layer. `print` shows it as a table; `result["layer.name"]` is one row."""

    rows: list[LayerResult]
    objective: str
    threads: int
    before: int  # bytes of the weights of these layers, shared weights counted once
    after: int
    replaced: tuple[str, ...] = ()  # names of the layers that this call compressed
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    calls: tuple[float, float] | None = None  # on a GPU: seconds of one call of the model before and after, not in a graph

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "model": None}  # a copy or a file holds no model

    def __getitem__(self, layer: str) -> LayerResult:
        for row in self.rows:
            if row.layer == layer:
                return row
        raise KeyError(f"no layer {layer!r} in this table.{nearest(layer, [row.layer for row in self.rows])}")

    @property
    def compressed(self) -> list[str]:
        """The names of the layers that are in a sparse format, those from earlier calls included."""
        return [row.layer for row in self.rows if row.format]

    @property
    def speedup(self) -> float:
        """Time before over time after, summed over all layers that were measured."""
        timed = [row for row in self.rows if row.dense_seconds is not None]
        now = sum((row.sparse_seconds if row.format else row.dense_seconds) or 0.0 for row in timed)
        return sum(row.dense_seconds or 0.0 for row in timed) / now if now else 1.0

    def metrics(self) -> dict[str, float]:
        """Returns the totals as a flat dictionary of numbers."""
        return {
            "layers": len(self.rows),
            "compressed": len(self.compressed),
            "bytes_before": self.before,
            "bytes_after": self.after,
            "speedup": self.speedup,
            "threads": self.threads,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain Python values that `json.dumps` accepts."""
        calls = {} if self.calls is None else {"calls": list(self.calls)}
        return {"objective": self.objective, **self.metrics(), **calls, "rows": [asdict(row) for row in self.rows]}

    def undo_(self, model: nn.Module | None = None) -> nn.Module:
        """Puts the dense layers back in place of the layers that this call compressed, and returns the model.

        Weights that were rounded (`values=`, `store=`) stay rounded: the old values are not kept.
        Layers from earlier calls stay compressed; `decompress_(model)` restores those too. Pass `model` to undo it in a copy.
        """
        model = self.model if model is None else model
        if model is None:
            raise ValueError("this result is a copy and does not remember its model; call undo_(model)")
        there = {name for name, module in model.named_modules() if isinstance(module, Compressed)}
        if missing := [name for name in self.replaced if name not in there]:
            raise ValueError(
                f"{', '.join(map(repr, missing[:3]))} of this result are not compressed in the model: the result was undone "
                "already, or belongs to another model"
            )
        return restore_(model, self.replaced)

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """The header and the rows. There is a column for errors only if values were stored in fewer bits."""
        header, rows = _HEADER, [*map(_cells, self.rows)]
        if all(row.error is None for row in self.rows):
            return header, rows
        shown = [_with_error(cells, "" if row.error is None else f"{row.error:.1e}") for cells, row in zip(rows, self.rows)]
        return _with_error(header, "error"), shown

    def _summary(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        timed = any(row.dense_seconds is not None for row in self.rows)
        return (
            f"{len(self.compressed)} of {len(self.rows)} layers compressed for {self.objective}, {threads}: "
            f"{self.before:,} bytes of weights are now {self.after:,}; "
            f"{f'measured layers {self.speedup:.2f}x' if timed else 'no layer was timed'}"
        )

    def _notes(self) -> list[str]:
        """Notes on calls without a CUDA graph, and on train mode, in which compressed layers raise."""
        notes = []
        if self.calls is not None and self.compressed:
            dense, now = self.calls
            line = f"one call of the model without a CUDA graph: {format_seconds(dense)} dense, {format_seconds(now)} now"
            slow = now > 0.95 * dense
            notes.append(line + ("; most of it is time of the host, which a CUDA graph saves" if slow else ""))
        modules = dict(self.model.named_modules()) if self.model is not None else {}
        training = any(name in modules and modules[name].training for name in self.compressed)
        if training:
            notes.append("the model is in train mode, and compressed layers run in eval mode only: call model.eval()")
        return notes

    def __str__(self) -> str:
        notes, (header, rows) = [self._summary(), *self._notes()], self._table()
        return str(Table(header, rows, right=_RIGHT | ({10} if "error" in header else set()), notes=notes, ruled=False))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, rows = self._table()
        return Table(header, rows, title=self._summary(), notes=self._notes()).html("notes")


_HEADER = ("layer", "kind", "zeros", "pattern", "format", "dense", "sparse", "ratio", "bytes", "now", "")
_RIGHT = {2, 5, 6, 7, 8, 9}  # columns of numbers


def _with_error(cells: tuple[str, ...], error: str) -> tuple[str, ...]:
    """Puts the column for errors in front of the last one, the reason."""
    return (*cells[:-1], error, cells[-1])


def _cells(row: LayerResult) -> tuple[str, ...]:
    dense, sparse = row.dense_seconds, row.sparse_seconds
    return (
        row.layer,
        row.kind,
        f"{row.sparsity:.1%}",
        row.pattern,
        row.format or "dense",
        format_seconds(dense) if dense is not None else "",
        format_seconds(sparse) if sparse is not None else "",
        f"{dense / sparse:.2f}x" if dense is not None and sparse else "",
        f"{row.before:,}",
        f"{row.after:,}",
        row.reason,
    )
