"""Parses the text of a PTX kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
TYPES = {f"{kind}{size}": np.dtype(f"{letter}{size // 8}") for kind, letter in (("u", "u"), ("b", "u"), ("s", "i"))
         for size in (8, 16, 32, 64)} | {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"),
         "bf16": np.dtype("u2"), "pred": np.dtype("?"), "bf16x2": np.dtype("u4"), "f16x2": np.dtype("u4")}  # fmt: skip


@dataclass
class Instruction:
    name: str  # "ld.global.v4.u32"
    operands: list[Any]
    guard: tuple[str, bool] | None  # predicate, and the value it must have
    text: str

    @property
    def parts(self) -> list[str]:
        return self.name.replace("::", "_").split(".")


@dataclass
class Place:
    """An operand in brackets."""

    base: Any
    offset: int


@dataclass
class Program:
    """A parsed kernel."""

    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, np.dtype] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)  # addresses in shared memory
    parameters: list[tuple[str, int]] = field(default_factory=list)
    shared: int = 0
    local: int = 0  # bytes of each thread

    @staticmethod
    def parse(text: str) -> Program:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
        text = text.replace(".shared::cta.", ".shared.")  # two names of one space
        text = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", text, flags=re.M)
        head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)[^{]*\{", text, flags=re.S)
        assert head is not None
        program = Program()
        for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head[2].strip()):
            program.parameters.append((name, TYPES[kind].itemsize))
        program._body(text[head.end() :])
        if ".extern .shared" in text:
            program.shared = -(-program.shared // 1024) * 1024
            program.symbols["global_smem"] = program.shared
        return program

    def _body(self, text: str) -> None:
        scopes: list[dict[str, str]] = [{}]
        statement = ""
        for char in text:
            if char == "{" and not statement.strip():
                scopes.append({})
            elif char == "}" and not statement.strip():
                scopes.pop()
                if not scopes:
                    return
                statement = ""
            elif char == ";":
                self._statement(statement.strip(), scopes)
                statement = ""
            elif char == ":" and re.fullmatch(r"\s*\$\w+", statement):
                self.labels[statement.strip()] = len(self.code)
                statement = ""
            else:
                statement += char

    def _statement(self, text: str, scopes: list[dict[str, str]]) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.replace(" ", "").split(","):
                many = re.fullmatch(r"(.+)<(\d+)>", name)
                for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                    scopes[-1][each] = own = f"{each}@{len(self.code)}" if len(scopes) > 1 else each
                    self.registers[own] = TYPES[kind[1:]]
        elif found := re.fullmatch(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\]", text):
            align, name, size = int(found[1]), found[2], int(found[3])
            scopes[-1][name] = own = f"{name}@{len(self.code)}"
            self.symbols[own] = -(-self.shared // align) * align
            self.shared = self.symbols[own] + size
        elif found := re.fullmatch(r"\.local\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]", text):
            self.symbols[found[1]], self.local = 0, -(-int(found[2]) // 16) * 16  # there is one for each kernel
        elif text:
            self._instruction(text, scopes)

    def _instruction(self, text: str, scopes: list[dict[str, str]]) -> None:
        def known(name: str) -> str:
            return next((scope[name] for scope in reversed(scopes) if name in scope), name)

        guard = None
        if found := re.match(r"@(!?)(\S+)\s+(.*)", text, flags=re.S):
            guard, body = (known(found[2]), found[1] == ""), found[3]
        else:
            body = text
        name, *more = re.split(r"\s+", body, maxsplit=1)
        operands = [_operand(each, known) for each in _split(more[0] if more else "")]
        self.code.append(Instruction(name, operands, guard, " ".join(text.split())))


def _split(text: str) -> list[str]:
    """Splits at the commas that are not inside braces or brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str, known: Callable[[str], str]) -> Any:
    """A register or symbol (str), a number (int, or float for 0f...), several of them (list), or a Place."""
    if text.startswith("{"):
        return [_operand(each, known) for each in _split(text[1:-1])]
    if text.startswith("["):
        base, *offset = text[1:-1].replace(" ", "").split("+")
        return Place(_operand(base, known), int(offset[0], 0) if offset else 0)
    if "|" in text:
        return [_operand(each, known) for each in text.split("|")]
    if text[:2] in ("0f", "0F", "0d", "0D"):
        size = 4 if text[1] in "fF" else 8
        return np.array(int(text[2:], 16), f"u{size}").view(f"f{size}").item()
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return known(text)
