"""Schedulers for data sparsifiers, with the names of `torch.ao.pruning._experimental.data_scheduler`."""

from .base_data_scheduler import BaseDataScheduler

__all__ = ["BaseDataScheduler"]
