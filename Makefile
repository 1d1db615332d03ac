# make run and make test do their whole set-up on a fresh machine that has Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test check setup clean

run: $(READY)
	$(BIN)/python src/run.py quant=nvfp4 aqn=exp

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[all,dev,peers]"
	touch $(READY)

clean:
	rm -rf $(VENV)
