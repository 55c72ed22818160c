# Everything a newcomer needs. The first target that is run makes .venv; later runs start at once.
PYTHON ?= python3
JOBS ?= 4
ARGS ?=
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS_STAMP := $(VENV)/.extras-installed
DOCS_STAMP := $(VENV)/.docs-installed
LEROBOT_VENV := .venv-lerobot
LEROBOT_STAMP := $(LEROBOT_VENV)/.installed
# Most modules of most packages are never imported: those that are get compiled then.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(PIP_INSTALL) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-extras test-lerobot docs check format install clean

help:  ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile
	@echo
	@echo '  ARGS="..."       more arguments for embodichain demo or pytest, such as make test ARGS="tests/config -k files"'
	@echo '  PYTHON=...       the Python (3.11 or later) to make .venv with'
	@echo '  TORCH_INDEX=URL  a package index to take torch from, such as the one with its CPU builds'

demo: $(STAMP)  ## Watch the product do its main job in small, on the CPU
	@$(BIN)/embodichain demo $(ARGS)
	@echo 'Now a policy learns from a live stream of such demonstrations.'
	@$(BIN)/python examples/agents/datasets/train_from_stream.py --output outputs/demo/trained_policy.mp4

test: $(STAMP)  ## Run the test suite
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not extra" $(ARGS)

# The tests that need lerobot are skipped here, except where LEROBOT_PYTHON names a Python that has it, as in .ci/run.
test-extras: $(EXTRAS_STAMP)  ## Run the tests that need optional packages: Ray, LeRobot, ONNX, transformers, peers, robots, viewer, sweeps, docs
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "extra and not gpu" --all-extras $(ARGS)

test-lerobot: $(EXTRAS_STAMP) $(LEROBOT_STAMP)  ## Compare with the real lerobot, in a Python of its own: recordings, policies
	@OMP_NUM_THREADS=1 LEROBOT_PYTHON=$(CURDIR)/$(LEROBOT_VENV)/bin/python \
	  $(BIN)/python -m pytest tests/agents/datasets/test_real_lerobot.py \
	  tests/agents/rl/test_smolvla.py::test_the_real_lerobot_agrees tests/agents/rl/test_openvla.py::test_the_real_libraries_agree $(ARGS)

docs: $(DOCS_STAMP)  ## Build the documentation's site: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 \
	  $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'wrote build/site/index.html'

check: $(STAMP)  ## Check format, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(STAMP)  ## Rewrite the sources the way check wants them
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

install: $(STAMP)  ## Make .venv and install everything for development

clean:  ## Remove .venv and all caches
	rm -rf $(VENV) $(LEROBOT_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch comes first and exactly pinned: a looser request brings gigabytes of CUDA packages to machines without a GPU.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or later is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); echo 'Making .venv failed; on Debian and Ubuntu, install the package python3-venv.' >&2; exit 1; }
	@echo 'Installing into .venv (once; a few minutes) ...'
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep "^torch==" constraints.txt)"
	@$(PIP) -e ".[dev]"
	@touch $@

$(EXTRAS_STAMP): $(STAMP)
	@echo 'Installing optional packages into .venv (once) ...'
	@$(PIP) --no-build-isolation -e ".[dev,ray,data,export,vla,peers,robots,viewer,sweep,docs]"
	@touch $@ $(DOCS_STAMP)

$(DOCS_STAMP): $(STAMP)
	@$(PIP) --no-build-isolation -e ".[dev,docs]"
	@touch $@

# lerobot wants other versions of much that is in .venv, and packages that reading a dataset does not need.
$(LEROBOT_STAMP): constraints-lerobot.txt
	@test -x $(LEROBOT_VENV)/bin/python || $(PYTHON) -m venv $(LEROBOT_VENV)
	@echo 'Installing lerobot into $(LEROBOT_VENV) (once) ...'
	@$(LEROBOT_VENV)/bin/python $(PIP_INSTALL) --no-deps \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r constraints-lerobot.txt
	@touch $@
