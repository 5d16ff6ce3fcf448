# One line per task. `make train` and `make test` do all their own set-up, from a fresh clone, on any Linux machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: train test check proofs bench clean

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: .venv/ready  ## format, lint, types, repository rules; under a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_repo.py

proofs: .venv/ready  ## the long checks: every random kill, every README command
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --proof

bench: .venv/ready  ## measure; results under bench/results/
	$(BIN)/python -m bench cpu

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
