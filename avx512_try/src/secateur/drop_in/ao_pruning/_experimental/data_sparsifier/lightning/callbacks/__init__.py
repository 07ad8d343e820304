"""The callbacks are in `data_sparsity`, which needs Lightning."""
