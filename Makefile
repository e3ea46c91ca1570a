# make run, make test: all a newcomer needs. `make help` lists the rest.
#
# PYTHON=...       the interpreter to build .venv with (3.11 or newer)
# TORCH_INDEX=...  where a CPU build of torch comes from without an NVIDIA GPU
# ARGS="..."       passed on to `baton up` or pytest

VENV ?= .venv
ARGS ?=
export PYTHON TORCH_INDEX

BIN = $(VENV)/bin
SETUP = VENV="$(abspath $(VENV))" sh deploy/setup/setup.sh
# The long ones first: by file as collected, e2e and integration before unit.
PARALLEL = -n auto --dist loadfile --no-loadscope-reorder
PYTEST = PYTHONPATH=tests/plugins $(BIN)/python -m pytest -p no_skips -p figures $(PARALLEL)

.PHONY: help run setup test test-all test-kernels chart conformance bench-engine lint format clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## set up, take the default model, start Baton and stay in the foreground
	@$(SETUP) run
	@exec $(BIN)/baton up $(ARGS)

setup: ## only set up, with what the tests need
	@$(SETUP) test

test: setup ## set up and run the tests
	@$(BIN)/baton pull
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: setup ## the same with the slow tests
	@$(BIN)/baton pull
	@$(PYTEST) $(ARGS)

chart: setup ## render the Helm chart to deploy/manifests and check what comes out
	@$(BIN)/python deploy/kubernetes.py $(ARGS)
	@$(PYTEST) -q tests/unit/deploy

test-kernels: setup ## the GPU kernels' tests, and every configuration compiled for sm_80, sm_90 and sm_100
	@$(PYTEST) tests/unit/kernels_gpu tests/integration/test_triton_workers.py $(ARGS)

conformance: setup ## check answers against OpenAI's schema: make conformance SPEC=path/to/openapi.json
	@test -n "$(SPEC)" || { echo "SPEC=path/to/openapi.json is missing"; exit 2; }
	@PYTHONPATH=tests/plugins $(BIN)/python tests/conformance/conformance.py "$(SPEC)"

bench-engine: setup ## what a step costs on this CPU, operation by operation
	@$(BIN)/baton pull
	@$(BIN)/python benchmarks/cpu.py $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff put the layout and the imports right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and everything built
	rm -rf "$(VENV)" build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find services libs kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

.DEFAULT_GOAL := help
