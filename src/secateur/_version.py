"""The version of the package, which pyproject.toml reads from here too."""

__version__ = "0.1.0"
