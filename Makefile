# Targets: `make help`. The environment is .venv; nothing outside it is touched.
PYTHON ?= python3
VENV   := .venv
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
THREADS := OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# What is compiled once need not be compiled by each of the hundreds of processes that tests start.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install test-install quickstart test test-slow mutants bench accuracy-parity learning-curves lint types format model clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

install: $(VENV)/.installed ## make .venv with covey and tested versions (.venv/bin/covey)

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("covey needs Python 3.11 or newer; this is %s. Try: make PYTHON=python3.12 ..." % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Installing covey into $(VENV) (about 1.5 GB, a minute or so; only the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq --constraint constraints.txt --editable .
	@touch $@

test-install: $(VENV)/.installed-test

$(VENV)/.installed-test: $(VENV)/.installed
	@$(PIP) install -qq --constraint constraints.txt --editable '.[test]'
	@touch $@

quickstart: install ## train the built-in model on the built-in task (about a minute on 2 cores)
	@$(VENV)/bin/covey quickstart

test: test-install lint types ## linters, type checker, tests: two at a time, on one thread each
	@$(THREADS) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

mutants: test-install ## plant every known fault and print what names it, when and how fast
	@$(THREADS) $(VENV)/bin/python tests/mutants/table.py

test-slow: test-install ## the tests that take minutes: learning curves, wheel in an empty environment
	@$(THREADS) $(VENV)/bin/python -m pytest -m slow

.bench/trl/.installed: bench/trl.txt
	@$(PYTHON) -m venv .bench/trl
	@.bench/trl/bin/python -m pip --disable-pip-version-check install -qq --requirement bench/trl.txt
	@touch $@

.bench/swift/.installed: bench/swift.txt
	@$(PYTHON) -m venv .bench/swift
	@.bench/swift/bin/python -m pip --disable-pip-version-check install -qq --requirement bench/swift.txt
	@touch $@

bench: test-install .bench/trl/.installed .bench/swift/.installed ## write docs/performance.md: covey, TRL and ms-swift in turns (two to three hours)
	@$(VENV)/bin/python bench/compare --trl .bench/trl/bin/python --swift .bench/swift/bin/python \
		--write docs/performance.md

accuracy-parity: test-install .bench/swift/.installed ## write the tables of docs/accuracy.md: covey, math-verify, TRL and ms-swift on the same answers
	@$(THREADS) $(VENV)/bin/python bench/accuracy_parity.py --swift .bench/swift/bin/python \
		--write docs/accuracy.md

learning-curves: test-install ## train with every algorithm; write the table and figure of docs/learning-curves.md
	@$(THREADS) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)/bin/python bench/learning_curves.py

lint: test-install ## ruff: rules and format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types: test-install ## mypy
	@$(VENV)/bin/mypy

format: test-install ## rewrite the files in the project's format
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

model: install ## rebuild the built-in model from random weights (about a minute)
	@$(VENV)/bin/python -m covey.quickstart.make_model

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
