"""Finds patterns of modules and functions in a traced graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.ao.quantization.utils import MatchAllNode
from torch.fx import Node
from torch.nn.utils.parametrize import type_before_parametrizations

__all__ = ["apply_match", "MatchAllNode"]


def _match(modules: Mapping[str, nn.Module], node: Any, current: Any) -> bool:
    """Returns whether a node matches one element of a pattern: a module of exactly this type, a function, or a name."""
    if isinstance(current, type) and issubclass(current, MatchAllNode):
        return True
    if not isinstance(node, Node):
        return False
    if isinstance(current, type) and issubclass(current, nn.Module):
        return node.op == "call_module" and type_before_parametrizations(modules[str(node.target)]) is current
    if callable(current):
        return node.op == "call_function" and node.target is current
    return isinstance(current, str) and node.target == current


def apply_match(
    modules: Mapping[str, nn.Module], pattern: Any, node: Node, matched_node_pattern: list[Node]
) -> list[Node] | None:
    """Returns the matched nodes followed by those from `node` on that match the pattern, or None.

    A node before the last one matches only if the next node is its only user, because all users of a layer change with it.
    """
    if not isinstance(pattern, tuple):
        return [node] if _match(modules, node, pattern) else None
    if not pattern or not _match(modules, node, pattern[0]):
        return None
    matched = [*matched_node_pattern, node]
    if len(pattern) == 1:
        return matched
    users = [user for user in node.users if user.users or user.op == "output"]  # ignores nodes whose result is not used
    return apply_match(modules, pattern[1:], users[0], matched) if len(users) == 1 else None
