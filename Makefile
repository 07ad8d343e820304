# `make test` or `make demo` is all a fresh machine with Python 3.11+ needs: .venv is made on the way.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := test
.PHONY: demo docs test test-oldest test-newest lint imports bench clean .venv

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# One thread per worker: two workers keep two cores busy without fighting over them.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The same with the oldest and the newest torch that pyproject.toml names as tested, each in an environment of its own.
test-oldest test-newest: test-%: .venv-%/.stamp
	OMP_NUM_THREADS=1 .venv-$*/bin/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright

# The site: site/index.html
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo site/index.html

imports: $(STAMP)
	$(BIN)/python tests/import_graph.py

bench: $(STAMP)
	@set -e; for script in benchmarks/*_cpu.py benchmarks/sparsifier.py benchmarks/train_step.py; do \
	  echo "--- $$script"; $(BIN)/python $$script; echo; \
	done

.venv: $(STAMP)

# torch goes first and alone, at the pinned version, so that the later resolve finds it in place.
# For the small CPU build from pytorch.org: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dev]'
	touch $@

TORCH_oldest := 2.11.0
TORCH_newest := 2.15.0

.venv-oldest/.stamp .venv-newest/.stamp: .venv-%/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	sed 's/^torch==.*/torch==$(TORCH_$*)/' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check -c .venv-$*/constraints.txt torch
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check -c .venv-$*/constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist out site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
