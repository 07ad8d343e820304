"""Schedulers set the sparsity level of a sparsifier as a function of the step."""
