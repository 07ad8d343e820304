"""Drop-in replacements for pruning interfaces of torch, on this package's engine."""
