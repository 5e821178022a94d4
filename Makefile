# `make demo` and `make test` need nothing but Python 3.11 or newer with its venv module, and a package index.
# Another interpreter or environment: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
READY := $(VENV)/.ready

.PHONY: help demo test test-sweeps test-all test-libraries test-gpu-compiler lint format types contracts docs bench figures setup clean

help:
	@echo "make setup      an environment in $(VENV); its commands are in $(BIN), such as $(BIN)/autopar"
	@echo "make demo       train a small GPT on 8 virtual CPU devices: on one mesh and as a pipeline, both compared with jax.jit"
	@echo "make test       a sample of every kind of test"
	@echo "make test-sweeps   what make test leaves out, without the slow tests"
	@echo "make test-all   all tests"
	@echo "make test-libraries   installs other packages, and runs train steps of their models"
	@echo "make test-gpu-compiler VENV=.venv-gpu   installs XLA's compiler for GPUs, which needs none, and holds plans against it"
	@echo "make lint | types | contracts     ruff | mypy --strict | import-linter"
	@echo "make format     let ruff mend what it can"
	@echo "make docs       the pages as a site, in build/site; warnings are errors"
	@echo "make bench      the scripts in benchmarks/ that need no argument, one after the other; hours"
	@echo "make figures    the tables and pictures in docs/benchmarks/; rows that are known are kept, the others take hours"
	@echo "make clean      remove environments, caches and build outputs"

demo: $(READY)
	$(BIN)/python -m autopar demo

test: $(READY)
	$(PYTEST) -m "not slow and not sweep"

test-sweeps: $(READY)
	$(PYTEST) -m "sweep and not slow"

test-all: $(READY)
	$(PYTEST)

test-libraries: $(READY)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["libraries"], sep="\n")' \
	  > $(VENV)/libraries.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement $(VENV)/libraries.txt
	$(PYTEST) tests/libraries tests/data_input tests/test_docs.py

test-gpu-compiler: $(READY)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["gpu-compiler"], sep="\n")' \
	  > $(VENV)/gpu_compiler.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement $(VENV)/gpu_compiler.txt \
	  "jax-cuda12-plugin==$$($(BIN)/python -c 'import jax; print(jax.__version__)')" \
	  "jax-cuda12-pjrt==$$($(BIN)/python -c 'import jax; print(jax.__version__)')"
	JAX_PLATFORMS=cpu $(PYTEST) tests/libraries/test_compile_only.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/mypy

contracts: $(READY)
	$(BIN)/lint-imports --no-logo

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(READY)
	@left=; for script in $$(grep -l __main__ benchmarks/*.py); do \
	  echo "== $$script"; $(BIN)/python $$script || left="$$left\n$$script: exit status $$?"; \
	done; printf "$${left:+These failed, missed a target (1), or need arguments (2):$$left\n}"

figures: $(READY)
	$(BIN)/python benchmarks/baselines_real.py --rounds 21 --plot
	-$(BIN)/python benchmarks/weak_scaling.py
	-$(BIN)/python benchmarks/ablations.py
	$(BIN)/python benchmarks/weak_scaling.py --plot
	$(BIN)/python benchmarks/ablations.py --plot

setup: $(READY)

# Done again whenever pyproject.toml changes. The dev group is read with tomllib: any pip of Python 3.11 can install it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11 or newer, $(PYTHON) is " \
	  + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV): a few minutes the first time; details in $(VENV)/setup.log"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["dev"], sep="\n")' \
	  > $(VENV)/dev-requirements.txt
	@$(BIN)/python -m pip install --disable-pip-version-check --editable . --requirement $(VENV)/dev-requirements.txt \
	  > $(VENV)/setup.log 2>&1 || { cat $(VENV)/setup.log; exit 1; }
	@touch $@

clean:
	rm -rf .venv .venv312 build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
