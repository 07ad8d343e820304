"""House rules that ruff, pyright and import-linter cannot state."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import import_graph
import secateur

SRC = Path(__file__).parents[1] / "src" / "secateur"
FILES = sorted(SRC.rglob("*.py"))
MAX_LINES = 450
ELSEWHERE = {"torch.distributed", "torch.ops.secateur"}  # names in CONTRIBUTING.md that are not ours


def name_of(file: Path) -> str:
    return file.relative_to(SRC).as_posix()


def uses_of_torch_distributed(source: str) -> list[int]:
    """Lines that import torch.distributed, or reach it as an attribute of torch."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                dotted = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                dotted = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr):
                dotted = [f"torch.{attr}"]
            case _:
                continue
        if any(f"{name}.".startswith("torch.distributed.") for name in dotted):
            lines.append(node.lineno)
    return sorted(set(lines))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch.distributed", [1]),
        ("import torch.distributed as dist", [1]),
        ("import torch.distributed.tensor", [1]),
        ("from torch import nn, distributed", [1]),
        ("from torch.distributed.tensor import DTensor", [1]),
        ("import torch\ntorch.distributed.is_initialized()", [2]),
        ("def f():\n    from torch.distributed import all_reduce", [2]),
        ("import torch\nfrom torch import distributions\ntorch.distributions", []),
        ("from .torch.distributed import x", []),
    ],
)
def test_uses_of_torch_distributed_are_found(source, lines):
    assert uses_of_torch_distributed(source) == lines


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_only_dist_uses_torch_distributed(file):
    if name_of(file).startswith("_dist/"):
        return
    lines = uses_of_torch_distributed(file.read_text(encoding="utf-8"))
    assert not lines, f"{name_of(file)}, lines {lines}: torch.distributed belongs in secateur/_dist only"


# --- imports, including those inside functions and under TYPE_CHECKING ------------------------------------------------------


@pytest.fixture(scope="module")
def imports():
    return import_graph.imports(import_graph.modules())


def test_no_modules_import_each_other(imports):
    found = [sorted(cycle) for cycle in import_graph.cycles(imports)]
    assert not found, f"import cycles: {found}; move what both need into a module below them"


def test_rooms_are_imported_through_their_facade(imports):
    found = sorted({(one.importer, one.imported) for one in import_graph.past_facades(imports)})
    assert not found, f"imports past a façade: {found}; import from the room's package, whose __init__ states what it offers"


@pytest.mark.parametrize("room", import_graph.ROOMS)
def test_facade_of_a_room_offers_only_names_that_exist(room):
    package = importlib.import_module(f"secateur.{room}")
    missing = [name for name in getattr(package, "__all__", ()) if not hasattr(package, name)]
    assert not missing


def write_package(src, files):
    for name, source in files.items():
        file = src / "secateur" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return import_graph.imports(import_graph.modules(src))


@pytest.mark.parametrize(
    "back",
    [
        "from .a import x",
        "from . import a",
        "import secateur.a",
        "from secateur.a import x",
        "def f():\n    from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x",
    ],
)
def test_every_kind_of_import_counts_for_a_cycle(tmp_path, back):
    found = write_package(tmp_path, {"__init__.py": "", "a.py": "from .b import y", "b.py": back})
    assert import_graph.cycles(found) == [["secateur.a", "secateur.b"]]


def test_cycles_through_several_modules_and_packages_are_found(tmp_path):
    files = {
        "__init__.py": "",
        "io/__init__.py": "from .a import x",
        "io/a.py": "from .. import c",
        "c.py": "from .io import x",
    }
    assert import_graph.cycles(write_package(tmp_path, files)) == [["secateur.c", "secateur.io", "secateur.io.a"]]


def test_modules_that_share_an_import_are_no_cycle(tmp_path):
    files = {"__init__.py": "from .a import x", "a.py": "from .c import x", "b.py": "from .a import x", "c.py": "import torch"}
    assert import_graph.cycles(write_package(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("importer", "line", "past"),
    [
        ("a.py", "from .trace import Trace", False),
        ("a.py", "from .trace.run import trace", True),
        ("a.py", "from .trace import run", True),
        ("a.py", "def f():\n    from .trace.run import trace", True),
        ("trace/other.py", "from .run import trace", False),
        ("surgery/a.py", "from ..trace.run import trace", True),
        ("tracers.py", "from .trace.run import trace", True),
    ],
)
def test_imports_past_a_facade_are_found(tmp_path, importer, line, past):
    files = {"__init__.py": "", "trace/__init__.py": "from .run import Trace", "trace/run.py": "", importer: line}
    assert bool(import_graph.past_facades(write_package(tmp_path, files))) == past


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_file_is_short_enough_to_be_one_thing(file):
    count = len(file.read_text(encoding="utf-8").splitlines())
    assert count <= MAX_LINES, f"{name_of(file)} has {count} lines; above {MAX_LINES} it is two things"


def test_every_public_function_and_class_has_a_docstring():
    bare = []
    for name in getattr(secateur, "__all__", ()):
        thing = getattr(secateur, name)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            doc = (thing.__doc__ or "").strip()
            if not doc or doc.startswith(f"{thing.__name__}("):  # the second: what @dataclass writes by itself
                bare.append(name)
    assert not bare, f"public names without a docstring: {', '.join(bare)}"


def test_importing_the_package_is_quick_and_needs_torch_numpy_and_safetensors_alone():
    code = """
import sys, time, torch, numpy
before, begin = set(sys.modules), time.process_time()
import secateur, secateur.drop_in.prune
took = time.process_time() - begin
new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
print(took, sorted(new - {"torch", "numpy", "safetensors", "secateur"}))
"""
    seen = []
    for _ in range(3):  # the best of three
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        took, _, foreign = out.strip().partition(" ")
        assert foreign == "[]", f"import secateur also imports {foreign}"
        seen.append(float(took))
    assert min(seen) < 0.5


def test_contributing_names_only_functions_and_classes_that_exist():
    text = (SRC.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    spans = re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    named = {span for span in spans if not span.endswith((".py", ".md", ".js", ".css", ".j2")) and span not in ELSEWHERE}
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {file.stem for file in FILES}
    assert len(named) > 20
    assert sorted(span for span in named if span.rsplit(".", 1)[1] not in defined) == []


def test_sparsegpt_shows_that_a_method_fits_into_150_lines():
    assert len((SRC / "methods" / "sparsegpt.py").read_text(encoding="utf-8").splitlines()) <= 150


def test_every_folder_of_tests_is_collected_and_checked(pytestconfig):
    """By default pytest and ruff leave out folders named `dist`, `build` or `venv`."""
    tests = Path(__file__).parent
    folders = {path.parent for path in tests.rglob("test_*.py")}
    left_out = pytestconfig.getini("norecursedirs")
    assert not [
        folder for folder in folders for part in folder.relative_to(tests).parts if any(fnmatch(part, o) for o in left_out)
    ]
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--show-files", tests]
    shown = subprocess.run(ruff, cwd=tests.parent, capture_output=True, text=True, check=True).stdout
    assert {Path(line).parent for line in shown.split()} >= folders
