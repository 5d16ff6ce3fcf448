# One line per task. `make train` and `make test` do all their own set-up, from a fresh clone, on any Linux machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

# What needs a GPU runs from a clone, with the torch, triton and pytest that the machine has: nothing is installed.
UNINSTALLED := PYTHONPATH=.:tests $(PYTHON)
# seconds of a test: many compile kernels for one to three minutes, and one that hangs must leave time for others
REPORTED = $(UNINSTALLED) -m pytest -p gpu_report --override-ini timeout=300 $(if $(PART),--part $(PART))
# what docs/gpu.md lists; SECONDS=390: as much of it as fits
ITEMS = $(UNINSTALLED) -m bench gpu $(if $(SECONDS),--seconds $(SECONDS))

# two tests at a time, one file's tests in one process: many tests wait, for timeouts and for one another's ranks.
# Proofs marked `alone` run by themselves: beside eight ranks of another, a run of two trains at a fifth of its speed.
# Bytecode is written, wherever it is otherwise not: else each worker, server and rank compiles what it imports of tests/.
WORKERS ?= 2
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: train test test-changed check docs proofs proofs-compiled proofs-together proofs-alone coverage mutations compile-check execute gpu gpu-cache nvlink two-sites bench clean

# the environment, remade when the pins or the package's metadata change
.venv/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[plot,test,dev]'
	touch .venv/ready

train: .venv/ready  ## build the data, pretrain the example (about 4 minutes on 2 cores), sample from it
	$(BIN)/tpformer data stdlib --out data
	$(BIN)/tpformer pretrain examples/gpt_tiny.toml --run.resume True
	$(BIN)/tpformer generate runs/gpt_tiny --prompt "def " --max-new-tokens 300 --temperature 0.6

test: .venv/ready  ## the test suite
	$(PYTEST)

test-changed: .venv/ready  ## the tests that this working copy's change reaches, the nearest first; SECONDS=60 of them at most
	OMP_NUM_THREADS=1 $(BIN)/python tests/changed.py $(if $(SECONDS),--seconds $(SECONDS))

check: .venv/ready  ## format, lint, types, repository rules; under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_repo.py

# not --quiet: what it hides does not count for --strict
docs: .venv/ready  ## the documentation site in build/site, an error for a link that leads nowhere
	$(PIP) --editable '.[docs]'
	$(BIN)/mkdocs build --strict

# what tests of extras need, all of one turn: lm-evaluation-harness, with its own adapter for transformers, pyarrow, wandb
.venv/eval: .venv/ready
	$(PIP) --editable '.[eval,parquet,wandb]' 'lm_eval[hf]'
	touch .venv/eval

# Most proofs take turns by the commit's hash, so that some commits run them all; TURN=all runs every one.
TURNS := 6
TURN ?= $(shell echo $$((0x$$(git rev-parse --short=7 HEAD) % $(TURNS))))
PROOF := --proof --turn $(TURN)

proofs: execute proofs-compiled proofs-together proofs-alone  ## the long checks: compiled and executed kernels, protocol model, random kills, README's commands

# For sm_90, without float16, and one tile of a GEMM: a fifth of the cases, of which each turn compiles a sixth. A proof
# says when the page of the whole check, `make compile-check`, is not of the code that launchers ask for now.
proofs-compiled: .venv/ready $(if $(filter 2 all,$(TURN)),.venv/gpu/ready)
	$(BIN)/python -m checks.compile --only '^(?!.* float16( |$$)).* sm_90 (\w+$$|.* 128x128x(64|128) )' \
		$(if $(filter all,$(TURN)),,--share $(TURN)/$(TURNS))
	$(if $(filter 2 all,$(TURN)),$(call COMPILED_AS_ON_GPUS,bfloat16|int32))

# The triton of many GPU images, beside this torch. It has to compile every variant of a kernel, too: one tile of it for
# sm_90, in proofs in bfloat16 if the kernel takes that, in the whole check in all dtypes. It lets no loads run ahead in a
# loop that has both TMA and indexed rows, as grouped GEMMs do. Where it cannot be installed, .venv/gpu/ready says so.
GPU_TRITON := 3.6.0
IN_FLOAT32 := (route|combine_statistics)
GROUPED := (all_gather_grouped|quantized_grouped|grouped_matmul)
ONE_TILE := ($$| 128x128x(64|128) )
COMPILED_AS_ON_GPUS = if [ -s .venv/gpu/ready ]; then cat .venv/gpu/ready; else export PYTHONPATH=.; \
	.venv/gpu/bin/python -m checks.compile --only '^(?!$(GROUPED)).* sm_90 ($(1))$(ONE_TILE)|^$(IN_FLOAT32).* sm_90' && \
	.venv/gpu/bin/python -m checks.compile --without loads_run_ahead --only '^$(GROUPED).* sm_90 ($(1))$(ONE_TILE)'; fi

.venv/gpu/ready: .venv/ready
	$(PYTHON) -m venv .venv/gpu
	grep -v triton constraints.txt > .venv/gpu/constraints.txt
	if .venv/gpu/bin/pip install --quiet --constraint .venv/gpu/constraints.txt torch triton==$(GPU_TRITON) numpy einops rich safetensors; \
	then : > $@; else echo "no kernel is compiled by triton $(GPU_TRITON), which cannot be installed here" > $@; fi

proofs-together: .venv/ready $(if $(filter 4 all,$(TURN)),.venv/eval)
	$(PYTEST) $(PROOF) -m "not alone"

proofs-alone: .venv/ready
	$(PYTEST) --numprocesses 0 $(PROOF) -m alone $$(grep -rl --include 'test_*.py' 'mark[.]alone' tests)

coverage: .venv/ready  ## lines and branches that the test suite runs; build/coverage/, and which tests reach what, for test-changed
	rm -rf build/coverage
	$(PYTEST) --cov --cov-context=test --cov-report=term:skip-covered --cov-report=json:build/coverage/coverage.json \
		--junitxml build/coverage/tests.xml
	$(BIN)/python tests/reach.py

mutations: .venv/ready  ## a fixed sample of wrong edits, each against the tests that reach it; after `make coverage`
	$(BIN)/python tests/mutants.py

compile-check: .venv/ready .venv/gpu/ready  ## every shipped kernel compiled for three GPU architectures, and its code checked; no GPU
	$(BIN)/python -m checks.compile
	$(call COMPILED_AS_ON_GPUS,\w+)

# the file that takes longest first
execute: .venv/ready  ## compiled kernels executed on the CPU, against their references and for races; no GPU
	$(PYTEST) --turn $(TURN) tests/execute/execute_mutants.py tests/execute/test_executor.py tests/execute/execute_*.py
	$(if $(filter all,$(TURN)),$(PYTEST) --proof tests/execute/execute_masks.py)

gpu:  ## the tests that need a GPU, and their reports under bench/results/; SECONDS=390: what fits
	$(ITEMS) --only '*tests*'

two-sites: .venv/ready  ## seconds of a step on two network namespaces that a slow link joins, in rounds of DiLoCo; RATE=1Gb/s
	$(if $(filter-out 0,$(shell id -u)),unshare --map-root-user --net) $(BIN)/python -m bench two_sites $(if $(RATE),--rate $(RATE))

nvlink:  ## the tests and the bench that need several GPUs, on all that there are; PART=1/2: half of the tests, no bench
	@gpus=$$($(PYTHON) -c "import torch; print(torch.cuda.device_count())") || exit 1; \
	if [ $$gpus -lt 2 ]; then echo "make nvlink does nothing: it needs two CUDA devices, and finds $$gpus"; exit; fi; \
	$(REPORTED) -m nvlink $(if $(PART),,&& \
	$(UNINSTALLED) -m torch.distributed.run --standalone --nproc-per-node $$gpus -m bench nvlink)

# Versions of many GPU images: an entry of Triton's cache is found by these alone, and by launchers of this Python.
IMAGE ?= .venv/image
IMAGE_PYTHON ?= python3.12
$(IMAGE)/bin/pytest:
	$(IMAGE_PYTHON) -m venv $(IMAGE)
	$(IMAGE)/bin/pip install --quiet torch==2.11.0 triton==$(GPU_TRITON) 'numpy<2.4' einops rich safetensors pytest

gpu-cache: $(IMAGE)/bin/pytest  ## compile what `make gpu` and `make bench` call on an H100 or H200, into .cache/; no GPU
	PYTHONPATH=.:tests $(IMAGE)/bin/python -m bench gpu --fill $(if $(SECONDS),--seconds $(SECONDS))

bench:  ## measure: the kernels where there is a GPU, in what the machine has, SECONDS=390: what fits; else the CPU; results: bench/results/
	@if $(UNINSTALLED) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; \
	then $(ITEMS) --only 'whole *'; \
	else $(MAKE) .venv/ready && for name in cpu memory pretrain zero bubbles data_parallel layouts families in_place planner faults observe protocol; do $(BIN)/python -m bench $$name || exit 1; done; fi

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
