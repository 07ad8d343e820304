"""Several processes: the only package that imports torch.distributed.

- `shares`: which part of a tensor a process holds, and which the others hold.
- `groups`: how processes agree (`Comm`), count, and move parts of tensors to each other.
- `data`: processes with their own share of the data.
- `guards`: what other libraries do to parameters, and models that cannot be pruned.

A sharded tensor is ranked where it lies. What travels is counts; a part of a tensor travels only where a pool is cut by the
sharding, one tensor at a time.
"""

from __future__ import annotations

from .data import DataRanks, data_ranks_of, same_batches
from .groups import (
    Comm,
    Group,
    Meeting,
    add_counts,
    check_copies,
    comm_of,
    count_local,
    counts,
    digest,
    exchange,
    mesh_comm,
    model_comm,
    replicas_of,
    together,
)
from .guards import class_of, refuse_flat, refuse_sharded, refuse_stage, reshard_, run_of
from .shares import Box, Share, as_rows, by_rows, check_alike, held, like, local, local_as, sharded, share_of, stripes

__all__ = [
    "Box", "Comm", "DataRanks", "Group", "Meeting", "Share", "add_counts", "as_rows", "by_rows", "check_alike", "check_copies",
    "class_of", "comm_of", "count_local", "counts", "data_ranks_of", "digest", "exchange", "held", "like", "local", "local_as",
    "mesh_comm", "model_comm", "refuse_flat", "refuse_sharded", "refuse_stage", "replicas_of", "reshard_", "run_of",
    "same_batches", "share_of", "sharded", "stripes", "together",
]  # fmt: skip
