"""Runs a function as soon as a module has been imported by anyone. Imports nothing but the standard library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], Any]) -> None:
    """Calls `action` now if the module is imported already, and otherwise at the end of its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher:
    """An entry of `sys.meta_path` that finds one module by the other entries and adds `action` to its execution, once."""

    def __init__(self, name: str, action: Callable[[], Any]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            loader.exec_module = self._then_act(loader)
        return spec

    def _then_act(self, loader: Any) -> Callable[[ModuleType], None]:
        def execute(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as it was
            loader.exec_module(module)
            self.action()

        return execute
