"""Sparsifiers: objects that put masks on the tensors of a model and compute them."""
