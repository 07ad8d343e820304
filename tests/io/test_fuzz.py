"""Loads a few hundred damaged files; benchmarks/fuzz_files.py loads thousands."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("fuzz_files", Path(__file__).parents[2] / "benchmarks" / "fuzz_files.py")
assert spec is not None
assert spec.loader is not None
fuzz_files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz_files)


def test_damaged_files_are_refused_in_words_and_leave_the_model_alone():
    seen, longest = fuzz_files.fuzz(200, seed=1)
    assert not [kind for kind in seen if kind.startswith("WRONG")]
    assert seen["refused"] > 150
    assert longest < 10
