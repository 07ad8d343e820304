"""Several processes: the only package that imports torch.distributed.

- `shares`: which part of a tensor a process holds, and which the others hold.
- `groups`: how processes agree (`Comm`), count, and move parts of tensors to each other.
- `guards`: what other libraries do to parameters, and models that cannot be pruned.

A sharded tensor is ranked where it lies. What travels is counts; a part of a tensor travels only where a pool is cut by the
sharding, one tensor at a time.
"""

from __future__ import annotations

from .groups import Comm, Group, comm_of, counts, digest, exchange, replicas_of
from .guards import refuse_flat, refuse_stage, reshard_, run_of
from .shares import Box, Share, as_rows, by_rows, like, local, local_as, sharded, share_of, stripes

__all__ = [
    "Box", "Comm", "Group", "Share", "as_rows", "by_rows", "comm_of", "counts", "digest", "exchange", "like", "local",
    "local_as", "refuse_flat", "refuse_stage", "replicas_of", "reshard_", "run_of", "share_of", "sharded", "stripes",
]  # fmt: skip
