"""The path of `ActivationSparsifier` in torch: the class is in the module of the same name."""
