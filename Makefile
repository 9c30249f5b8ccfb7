# Every target sets itself up: it needs only Python 3.11 or newer, git and make, and puts everything else into .venv.
#
#   make search     the main job: search kernels (for this machine's GPU, or predicted for an A100 where there is none)
#   make test       all tests that need no GPU
#   make check      what a reviewer runs: format, lint, types, layers, tests
#   make docs       the documentation as a site, in site/
#   make newest     calls, gradients, functions, a search and kernels with the newest PyTorch and Triton, in an environment of its own
#
# Variables: PYTHON (the interpreter to start from), VENV (the folder), NEWEST (the folder of `make newest`), TORCH (a requirement
# such as torch==2.11.0), ALL (not empty: `make newest` compiles every kernel, for half an hour and more), SEARCH (more arguments for `flashtune search`), PYTEST (more arguments for pytest).

VENV ?= .venv
NEWEST ?= .venv-newest
TORCH ?=
ALL ?=
SEARCH ?=
PYTEST ?=
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# One more than cores, since many tests wait for processes of their own.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
RUN_PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST)

# Setting up compiles no package ahead: where bytecode weren't kept, each of the tests' many processes would compile torch anew, in 4 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup search test check lint format golden docs newest dist clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@test -n "$(PYTHON)" || { echo "flashtune needs Python 3.11 or newer on PATH, or make PYTHON=/path/to/python3.11" >&2; exit 4; }
	@$(PYTHON) tools/setup_venv.py $(VENV) --torch "$(TORCH)"

search: setup
	@$(BIN)/python tools/first_search.py $(SEARCH)

test: setup
	@$(RUN_PYTEST)

check: lint
	@$(RUN_PYTEST)

lint: setup
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Rewrites tests/golden; review the diff before committing it.
golden: setup
	@$(RUN_PYTEST) --update-golden

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

newest:
	@$(MAKE) --no-print-directory setup VENV=$(NEWEST) TORCH=newest
	@$(NEWEST)/bin/python tools/newest.py $(if $(ALL),--all)

dist: setup
	@$(BIN)/python -m build
	@for kernels in kernels/*/pyproject.toml; do $(BIN)/python -m build --wheel --outdir dist $${kernels%/*} || exit; done

clean:
	@rm -rf $(VENV) $(NEWEST) build kernels/*/build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
