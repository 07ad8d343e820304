"""Methods: how the weights answer a budget, beyond ranking once. One file for each."""
