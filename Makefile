# Every target makes the virtual environment first; a second call skips what stands.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed.stamp

export OMP_NUM_THREADS := 1

.PHONY: venv test lint demo bench gpu-check clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[all,dev]' --constraint constraints.txt
	touch $@

test: lint
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m pytest -n 2 --quiet

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Source frameworks x backends x schedules on a batch of real text, then 100 training steps on each backend.
demo: $(STAMP)
	$(BIN)/plait compare llama --config tiny --frontend torch,flax --backend torch,jax \
	    --engine distributed,mpmd,spmd --schedule 1f1b,zb-h1 --ranks 2 --microbatches 8 \
	    --train 100 --json out/demo.json

bench: $(STAMP)
	status=0; for script in $(filter-out benchmarks/gpu_check.py benchmarks/delayed_transport.py,$(sort $(wildcard benchmarks/*.py))); do \
	    $(BIN)/python $$script || status=1; done; exit $$status

gpu-check: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py

clean:
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
