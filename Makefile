# make run and make test do their whole set-up on a fresh machine that has Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# CONSTRAINTS=/dev/null for the newest releases that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
CLUSTER_VENV := .venv-cluster
CLUSTER_READY := $(CLUSTER_VENV)/.ready
REAL_READY := $(VENV)/.ready-real

# All studies of conf/experiment/tiny, the largest first: together the tiny study. It begins with one setting of it on every base, so
# that the bases are made side by side, and not one after the other while the runs of each wait for it.
STUDIES := main $(filter-out main base,$(basename $(notdir $(wildcard conf/experiment/tiny/*.yaml))))
FIRST := experiment=tiny/main quant=bf16 aqn=none optim.lr=3e-4
FAULTS ?= 200
SLOTS ?= $(shell env -u OMP_NUM_THREADS nproc)

.PHONY: run study study-real test test-faults test-models test-vllm test-cluster test-page test-real check docs notebooks setup clean

run: $(READY)
	$(BIN)/python src/run.py quant=nvfp4 aqn=exp

# 1,312 runs, each on a core of its own. The same command continues a study that was stopped and repeats what failed.
# BASES=0,1,2,3 SEEDS=0 for others than the studies' 16 base models (model.seed) and two seeds on each: 164 runs.
study: $(READY)
	@for chosen in "$(FIRST)" $(STUDIES:%=experiment=tiny/%); do \
		$(BIN)/python src/run.py -m $$chosen $(BASES:%=model.seed=%) $(SEEDS:%=seed=%) hydra.launcher.slots=$(SLOTS) || { \
			code=$$?; test $$code -lt 128 || exit $$code; failed="$$failed $$chosen"; }; \
	done; test -z "$$failed" || { echo "not complete:$$failed; make study repeats the runs that failed"; exit 1; }

# Copies of a released model on one GPU, and whether they fall where the committed ones say (studies/real-2026/repeat.py).
# SIZE=05b or 15b, COPIES=1,2, RUNS=4 at a time side by side; MODEL=FILE.gguf and DATA=FOLDER if the hub is not reachable.
SIZE ?= 05b
COPIES ?= 1
RUNS ?= 1
study-real: $(READY)
	$(BIN)/python studies/real-2026/repeat.py $(SIZE) copies=$(COPIES) slots=$(RUNS) $(if $(filter-out 1,$(RUNS)),mps=true) \
		$(if $(MODEL),model=$(MODEL)) $(if $(DATA),data=$(DATA))

# Bytecode is kept whatever the shell says: without it each of the processes compiles all tests and modules again.
test: $(READY)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Kills, full disks, damaged files and more, each on a run of its own; under ten minutes on two cores. FAULTS=1000 for more.
# OUT=FILE gets the table, and faults.csv beside it a line for each fault, behind which the same command goes on.
test-faults: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.campaign --faults $(FAULTS) $(if $(OUT),--out $(OUT) --resume)

# Every architecture in every weight format against docs/models.csv. After a change that is meant: the same without --check.
test-models: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.matrix --check

# vLLM for CPUs in an environment of its own (3.9 GB): about four minutes to install and three to test.
test-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm

# Sweeps on a real Slurm on this machine: an environment of its own (1.2 GB) and, as root, Debian's Slurm.
SLURM := slurmctld slurmd slurm-client munge
test-cluster: $(CLUSTER_READY)
	@command -v slurmctld slurmd sbatch munged >/dev/null || { apt-get update && apt-get install --yes --no-install-recommends $(SLURM); } \
		>/dev/null 2>&1 || echo "Slurm cannot be installed here (root, and Debian's $(SLURM)): its tests are skipped"
	OMP_NUM_THREADS=1 $(CLUSTER_VENV)/bin/python -m pytest tests/cluster -n 2 --dist loadfile --durations=0

# Pages of reports in a headless browser, without a script, printed, by keyboard: as root, Debian's Chromium.
test-page: $(READY)
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
		{ apt-get update && apt-get install --yes --no-install-recommends chromium; } >/dev/null 2>&1 || \
		echo "Chromium cannot be installed here (root, and Debian's chromium): its tests are skipped"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/page

# SmolLM2 (98 MB out of its Python package) for three steps, and GGUF files of each architecture beside llama.cpp, which is
# built from source: a C++ compiler and ten minutes.
test-real: $(REAL_READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real -m real --durations=0

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# The documentation site in site/html. Generated pages, pictures and the outputs of the notebooks are committed.
docs: $(READY)
	$(BIN)/python docs/reference/write.py
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/site.py

notebooks: $(READY)
	$(BIN)/python notebooks/store.py

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), 4 GB in three parts, once. 1 of 3: PyTorch, most of it"
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) "torch>=2.11,<2.16"
	@echo "2 of 3: what trains, draws and tests"
	$(BIN)/python -m pip install --constraint $(CONSTRAINTS) --editable ".[all,dev,peers]"
	@echo "3 of 3: the tasks of reasoning_gym"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[reasoning]" \
		|| echo "task=reasoning_gym is left out: its package cannot be installed here (pycosat needs a C compiler)"
	touch $(READY)

$(REAL_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-binary llama-cpp-python llama-cpp-python==0.3.36
	touch $(REAL_READY)

# Without dependencies: the file names them all.
$(VLLM_READY): pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $(VLLM_READY)

$(CLUSTER_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTER_VENV)
	$(CLUSTER_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) "torch>=2.11,<2.16"
	$(CLUSTER_VENV)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable ".[dev,slurm]"
	touch $(CLUSTER_READY)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(CLUSTER_VENV) site
