"""Where torch keeps `ActivationSparsifier`: the class is in the module of the same name."""
