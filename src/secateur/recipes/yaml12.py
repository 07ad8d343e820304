"""Reads YAML with the numbers of YAML 1.2: "2:4" is text and 1e-4 is a number. PyYAML reads them as 124 and as text.

A key that a mapping has twice is an error, where PyYAML takes the last one.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?[0-9]+",
    "tag:yaml.org,2002:float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}


def read_yaml(text: str) -> Any:
    """The plain values in a YAML text. Raises `yaml.YAMLError`."""
    import yaml

    return yaml.load(text, _loader())


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A SafeLoader with other numbers, and without keys that are there twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag not in _NUMBERS]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _NUMBERS.items():
        Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list("-+.0123456789"))
    return Loader
