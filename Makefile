# SPDX-License-Identifier: Apache-2.0
# Every target works in a fresh clone: it creates .venv from $(PYTHON) and
# installs what it needs. `make demo PYTHON=python3.12` uses another Python.

PYTHON ?= python3
VENV ?= .venv
# Tests mostly compile, which keeps one core busy per process; so does a run of
# the sweep.
JOBS ?= 2
ARGS ?=
FIRST_LAW ?= --config=configs/scaling.py:scale=first --workdir=runs/first_law \
  --launcher=together --set threads=$(JOBS)
# Experts are distributed over 8 devices, and everything is cut in 8; a device
# processes two sequences of each microbatch.
POD ?= --config=configs/kimi_linear.py:size=48b --topology=v5p:4x4x4 \
  --config.mesh.data=1 --config.mesh.expert=8 --config.mesh.fsdp=8 \
  --config.optim.accumulate_steps=16 --config.model.depth_loop=scan \
  --until=schedule

BIN := $(VENV)/bin
# Neighbours of a file stay on one worker, which keeps what it compiled.
PYTEST := -m pytest -n $(JOBS) --dist worksteal
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

.DEFAULT_GOAL := help
.PHONY: help demo sweep pod test test-all test-slow lint format notebooks clean

help:
	@echo "make demo       train four residual schemes side by side (5 minutes on 2"
	@echo "                cores; stop and rerun it at any time);"
	@echo "                runs/demo/report.html follows"
	@echo "make sweep      a first scaling law of three schemes (10 minutes on 2"
	@echo "                cores), the same way; runs/first_law/report.html"
	@echo "make pod        compile the 48B training step for 64 TPU v5p chips, without"
	@echo "                having them, and report memory and time (about 5 minutes)"
	@echo "make test       run every law once (about 5 minutes on 2 cores)"
	@echo "make test-all   run more cases and longer tests, too (about 15 minutes)"
	@echo "make test-slow  run all of these and the slow tests"
	@echo "make lint       check style and types"
	@echo "make format     apply the style"
	@echo "make notebooks  run the notebooks"
	@echo "make clean      remove the virtual environment"
	@echo
	@echo "PYTHON=python3.12 selects the interpreter; ARGS=... is passed on."

demo: $(VENV)/.demo-$(VERSION)
	$(BIN)/python -m experiments.demo.run $(ARGS)

sweep: $(VENV)/.demo-$(VERSION)
	$(BIN)/python -m experiments.scaling_law.run $(FIRST_LAW) $(ARGS)

pod: $(VENV)/.pod-$(VERSION)
	$(BIN)/python -m attnres_jax.plan $(POD) $(ARGS)

test: $(VENV)/.dev-$(VERSION)
	$(BIN)/python $(PYTEST) -m "not more and not slow" $(ARGS)

test-all: $(VENV)/.dev-$(VERSION)
	$(BIN)/python $(PYTEST) $(ARGS)

test-slow: $(VENV)/.dev-$(VERSION)
	$(BIN)/python $(PYTEST) -m "slow or not slow" $(ARGS)

lint: $(VENV)/.dev-$(VERSION)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python dev/words.py
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

format: $(VENV)/.dev-$(VERSION)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.dev-$(VERSION)
	$(BIN)/python -m notebooks.execute $(ARGS)

clean:
	rm -rf $(VENV)

# One stamp per Python version: another PYTHON recreates the environment, and a
# changed pyproject.toml updates it.
$(VENV)/.made-$(VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is not Python 3.11 or newer; try" \
	    "make PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.demo-$(VERSION): $(VENV)/.made-$(VERSION) pyproject.toml
	@$(BIN)/python dev/install.py plots
	@touch $@

# The compiler is part of the TPU library.
$(VENV)/.pod-$(VERSION): $(VENV)/.made-$(VERSION) pyproject.toml
	@$(BIN)/python dev/install.py tpu
	@touch $@

$(VENV)/.dev-$(VERSION): $(VENV)/.made-$(VERSION) pyproject.toml
	@$(BIN)/python dev/install.py dev
	@touch $@
