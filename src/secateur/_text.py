"""Reads values from text such as "owl(0.1)" or "sparsegpt(damp=0.05)". No code in the text is run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def read_call(text: str, known: Mapping[str, Callable[..., Any]]) -> Any:
    """Calls the function of this name with the arguments in the text: numbers, strings, None, booleans, tuples, and calls.

    Raises ValueError for anything else.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body, known)
    except SyntaxError:
        raise ValueError(f"{text!r} is not of the form name(argument, name=argument)") from None


def percent_hint(given: object) -> str:
    """A hint for errors where a fraction is expected and 50 or "50%" was given; "" for other values."""
    text = str(given).strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        return ""
    return f"; {value:g} % is {value / 100:g}" if 0 <= value <= 100 and (value > 1 or text.endswith("%")) else ""


def _check_arguments(name: str, function: Callable[..., Any], given: list[Any], named: dict[str, Any]) -> None:
    """Raises TypeError, with the names that the function takes, unless it takes these arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; it takes {', '.join(signature.parameters) or 'no arguments'}") from None


def _value(node: ast.expr, known: Mapping[str, Callable[..., Any]]) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in known:
            named = {keyword.arg: _value(keyword.value, known) for keyword in keywords if keyword.arg}
            given = [_value(arg, known) for arg in args]
            _check_arguments(name, known[name], given, named)
            return known[name](*given, **named)
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return tuple(_value(part, known) for part in parts)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError(f"{ast.unparse(node)!r} is neither a plain value nor a call of {', '.join(known)}")
