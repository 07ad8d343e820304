"""Reads the import graph of `src/secateur` from its source, and prints it room by room (`make imports`).

Every import statement counts: those at the top of a module, those inside functions and those under `TYPE_CHECKING`. A module
that imports a name from a package depends on the package's `__init__`; one that imports a submodule depends on that submodule.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

SRC = Path(__file__).parents[1] / "src"
PACKAGE = "secateur"

# Packages that other code imports only through their `__init__`, the façade.
ROOMS = (
    *("axes", "ops", "trace", "edit", "surgery.exact", "surgery.depth", "surgery.calibrate"),
    *("surgery", "execute", "io", "methods", "kernels", "recipes", "reports", "tuning", "_dist"),
)


class Import(NamedTuple):
    """An import statement: `importer` depends on the module `imported`."""

    importer: str
    imported: str
    line: int


def modules(src: Path = SRC) -> dict[str, Path]:
    """Every module of the package by its dotted name; a package stands for its `__init__`."""
    found = {}
    for file in sorted((src / PACKAGE).rglob("*.py")):
        parts = file.relative_to(src).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(files: Mapping[str, Path]) -> list[Import]:
    """All imports between these modules."""
    return [found for name, file in files.items() for found in _imports_of(name, file, files)]


def _imports_of(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, file.name == "__init__.py", node)
            targets = [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
        else:
            continue
        yield from (Import(name, target, node.lineno) for target in dict.fromkeys(targets) if target in known)


def _absolute(name: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The dotted name of the module that a `from` statement names, relative or not."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    up = node.level - is_package
    return ".".join([*(parts[:-up] if up else parts), *([node.module] if node.module else [])])


def cycles(found: Iterable[Import]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others (strongly connected components)."""
    after: dict[str, set[str]] = {}
    for importer, imported, _ in found:
        after.setdefault(importer, set()).add(imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        queue = [start]
        while queue:
            new = after.get(queue.pop(), set()) - seen
            seen |= new
            queue += new
        return seen

    reach = {name: reached(name) for name in after}
    in_cycle = [name for name in after if name in reach[name]]
    groups = [tuple(other for other in in_cycle if other in reach[name] and name in reach[other]) for name in in_cycle]
    return [list(group) for group in dict.fromkeys(groups)]


def past_facades(found: Iterable[Import], rooms: Iterable[str] = ROOMS) -> list[Import]:
    """Imports of a module inside a room by a module outside that room."""
    packages = [f"{PACKAGE}.{room}" for room in rooms]
    return [one for one in found if any(_inside(one.imported, p) and not _inside(f"{one.importer}.", p) for p in packages)]


def _inside(name: str, package: str) -> bool:
    return name.startswith(f"{package}.")


def room_of(name: str) -> str:
    """The room of a module; outside of rooms, the top-level module or package that holds it."""
    found = [room for room in ROOMS if _inside(f"{name}.", f"{PACKAGE}.{room}")]
    return max(found, key=len) if found else [*name.split("."), "__init__"][1]


def main() -> None:
    files = modules()
    found = imports(files)
    lines = Counter()
    for name, file in files.items():
        lines[room_of(name)] += len(file.read_text(encoding="utf-8").splitlines())
    edges = {(room_of(one.importer), room_of(one.imported)) for one in found}
    print(f"{'room':<18}{'modules':>8}{'lines':>8}  imports")
    for room, count in lines.items():
        used = sorted(other for own, other in edges if own == room and other != room)
        print(f"{room:<18}{sum(room_of(name) == room for name in files):>8}{count:>8}  {' '.join(used)}")
    print(f"{'all':<18}{len(files):>8}{lines.total():>8}")
    _list("import cycles", [" <-> ".join(cycle) for cycle in cycles(found)])
    _list("imports past a façade", [f"{i.importer}:{i.line} -> {i.imported}" for i in past_facades(found)])


def _list(title: str, items: list[str]) -> None:
    print(f"\n{title}:", *(items or ["none"]), sep="\n  ")


if __name__ == "__main__":
    main()
