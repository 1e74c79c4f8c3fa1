# Headrace needs Python 3.11 to 3.13, pip and make. `make demo` and `make test` set up what they use.

PYTHON ?= python3
VENV ?= .venv
# One requirement for torch and any extra pip arguments, so that the machine's owner decides the build.
TORCH ?= torch==2.13.0
PIP_ARGS ?=
EXTRAS ?= dev
BENCHES ?= overlap engine
ALL_GPU_BENCHES := start engine-0.5b engine-1.5b engine-7b step train-1.5b train-7b sync-1.5b sync-7b mismatch soak
GPU_BENCHES ?= $(ALL_GPU_BENCHES)
# For bench-gpu: the Python of an environment with Headrace, vLLM and TRL, unless they are in this one.
PEER_PYTHON ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.headrace-setup
# More threads than one per process only get in each other's way on the small models of the tests.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
# Benchmarks would take each other's time.
.NOTPARALLEL:
.PHONY: help setup demo test test-slow test-gpu check format docs bench bench-gpu clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'
	@echo 'variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) PIP_ARGS=$(PIP_ARGS) EXTRAS=$(EXTRAS)'

setup: $(STAMP)  ## create the virtual environment and install Headrace into it

# Torch is named in the same command as everything else: a second command could replace its build.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo 'Python 3.11 to 3.13 is needed: set PYTHON, for example make setup PYTHON=python3.11' >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt '$(TORCH)' -e '.[$(EXTRAS)]'
	@touch $@

demo: setup  ## train a small model until its reward has visibly risen (under two minutes)
	$(BIN)/headrace demo

test: setup  ## the tests that need neither minutes nor a GPU
	$(PYTEST) -m 'not slow and not gpu'

test-slow: setup  ## the tests that take minutes
	$(PYTEST) -m 'slow and not gpu' --timeout 1200

test-gpu: setup  ## the tests that need a CUDA device
	$(PYTEST) -m gpu --timeout 1200
	$(PYTEST) -k 'cuda_ipc or nccl or gpu' tests/integration/test_weight_contract.py

check: setup  ## lint, formatting, types and layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q tests/test_architecture.py

format: setup  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup  ## rewrite the generated pages
	$(BIN)/python -m headrace.config > docs/settings.md.new && mv docs/settings.md.new docs/settings.md
	$(BIN)/python -m headrace.algos docs/losses.md docs/pivots.md

bench: setup  ## the benchmarks named in BENCHES, each into build/bench/NAME.json
	@mkdir -p build/bench
	for name in $(BENCHES); do $(BIN)/headrace bench $$name --json build/bench/$$name.json || exit 1; done

GPU_BENCH = $(BIN)/headrace bench
PEER := $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))
gpu-start := start
gpu-engine-0.5b := engine --shape qwen2-0.5b --against vllm $(PEER)
gpu-engine-1.5b := engine --shape qwen2-1.5b --against vllm $(PEER)
gpu-engine-7b := engine --shape qwen2-7b --against vllm $(PEER)
gpu-step := step --max-lag 0 --max-lag 1 --against trl $(PEER) --steps 3 --offload first_moments
gpu-train-1.5b := train
gpu-train-7b := train --shape qwen2-7b --groups 4 --row-tokens 8192 --no-optimizer
gpu-sync-1.5b := sync --shape qwen2-1.5b --only full-cuda_ipc
gpu-sync-7b := sync --shape qwen2-7b --only full-cuda_ipc
gpu-mismatch := mismatch --against vllm $(PEER)
gpu-soak := soak

bench-gpu: $(addprefix bench-gpu-,$(GPU_BENCHES))  ## what one GPU is held to, with its peers, or a part (GPU_BENCHES); then the aims beside what was seen
	$(GPU_BENCH) aims build/bench --picture build/bench/gpu.svg

bench-gpu-%: setup
	$(if $(gpu-$*),,$(error there is no GPU benchmark $*; name some of: $(ALL_GPU_BENCHES)))
	@mkdir -p build/bench
	-$(GPU_BENCH) $(gpu-$*) --json build/bench/$*.json

clean:  ## remove caches and build products; the virtual environment and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
