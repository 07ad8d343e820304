"""Drop-ins: the interfaces people have code for, on this package's own engine."""
