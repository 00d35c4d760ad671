# demo and test set themselves up: they need Python (3.10 or newer), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test slurm cluster cluster-down bench lint clean

help:
	@echo "make demo          train a small GPT on 2 virtual nodes x 2 ranks of this machine"
	@echo "make test          every test; as root also those on a real Slurm, which it installs"
	@echo "make test-slurm24  the Slurm tests again on Slurm 24.11 (root; makes a folder with Debian trixie, once)"
	@echo "make cluster       start a real 4-node Slurm on this machine (root); make cluster-down ends it"
	@echo "make bench         submit latency and bring-up beside peers (root)"
	@echo "make lint          ruff, mypy, shellcheck"

demo: $(VENV)/job
	$(BIN)/python -m hpcinit.submit cluster=local nodes=2 ranks_per_node=2 job=train_gpt wait=true

test: $(VENV)/dev slurm lint
	$(BIN)/python -m pytest $(PYTEST)

# Slurm, MPI and the shells that the tests use, those missing, from Debian's packages, where this is root; pytest
# says loudly what it left out where it is not.
slurm: $(VENV)/dev
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.minislurm install; fi

# The same Slurm tests on Slurm 24.11, in a folder with Debian trixie that is made once (root; 640 MB, two minutes).
.PHONY: test-slurm24
test-slurm24: $(VENV)/dev
	$(BIN)/python -m tests.minislurm.trixie $(if $(MIRROR),--mirror $(MIRROR)) \
		$(BIN)/python -m pytest -m slurm $(PYTEST)

cluster: slurm
	@$(BIN)/python -m tests.minislurm up --nodes $(or $(NODES),4) $(if $(ACCOUNTING),--accounting)

cluster-down: $(VENV)/dev
	@$(BIN)/python -m tests.minislurm down

bench: $(VENV)/dev slurm
	$(BIN)/python -m benchmarks.submit
	$(BIN)/python -m benchmarks.bringup
	$(BIN)/python -m benchmarks.nodelist

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck sbatch/*.sbatch .ci/run

clean:
	rm -rf $(VENV)

# The stamp files say what is installed; pyproject.toml and constraints.txt say what should be.
$(VENV)/job: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[job]'
	@touch $@

# DeepSpeed comes as source that imports torch to build itself, hence no isolation; its ops are left out.
$(VENV)/dev: $(VENV)/job
	$(PIP) --editable '.[job,test]' setuptools wheel ninja
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation 'deepspeed>=0.18.5'
	@touch $@
