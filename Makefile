# demo and test set themselves up: they need Python (3.10 or newer), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The oldest DeepSpeed that we support, in an environment that has the rest from the first one.
DS18_VERSION := 0.18.5
DS18 := $(VENV)/deepspeed-$(DS18_VERSION)

# The oldest and the newest torch that we support, each in an environment that has the rest from the first one. pip's usual
# index has builds for CUDA, 5.5 GB each; TORCH_INDEX=https://download.pytorch.org/whl/cpu has small ones for CPUs.
TORCH_VERSIONS ?= 2.10.0 2.14.1
TORCH_INDEX ?=

# Tests mostly wait for Slurm and for each other's ranks, so there are more workers than cores. 0: one test after the other.
PYTEST_WORKERS ?= 6

COVERAGE_WORKERS ?= 3

# make check runs what needs neither Slurm nor torch processes, where processes of pytest itself are most of the work.
CHECK_WORKERS ?= 2
CHECKED := $(addprefix tests/,base records world ds_config slurm why config docs discover doctor) \
	$(addprefix tests/submit/test_,$(addsuffix .py,environment folder plan provenance script syntax)) \
	$(addprefix tests/test_,$(addsuffix .py,cli completion decoding imports names package readme security_page workers)) \
	$(addprefix --deselect=tests/records/test_memory.py::test_,the_formulas_are_what_real_ranks_hold the_backward_pass_stays_below_the_estimate)

# Lines of hpcinit that the tests reach, in percent, in processes that they start too: docs/decisions/0028-coverage.md.
# Without root (no Slurm) and with a part of the tests (TESTS=..., PYTEST=...) there is no floor.
COVERAGE_FLOOR ?= $(if $(strip $(TESTS)$(PYTEST)),0,$(if $(filter 0,$(shell id -u)),92,0))

# Not the wheel that a test installs, nor a run's snapshot.
OF_CHECKOUT := --include='hpcinit/*'

LOWEST := $(VENV)/lowest

.PHONY: help demo test check test-deepspeed-0.18 slurm cluster cluster-down bench lint clean

help:
	@echo "make demo          train a small GPT on 2 virtual nodes x 2 ranks of this machine"
	@echo "make check         lint, types, and the tests without Slurm and without torch processes: two minutes"
	@echo "make test          lint and every test; as root also on a real Slurm, which it installs (PYTEST_WORKERS=0: one by one)"
	@echo "make test-deepspeed-0.18  a part of make test: what DeepSpeed does, with $(DS18_VERSION), the oldest we support"
	@echo "make test-torch    a part of the tests with torch $(firstword $(TORCH_VERSIONS)) and $(lastword $(TORCH_VERSIONS)), the oldest and the newest we support; installs them, once (11 GB)"
	@echo "make test-cuda-build  torch's CUDA build without a GPU: imports before a fork, variables, formats (5.5 GB, once)"
	@echo "make test-slurm24  the Slurm tests again on Slurm 24.11 (root; makes a folder with Debian trixie, once)"
	@echo "make test-lowest   what a login node does, with the oldest versions of the packages that it needs"
	@echo "make test-horovod  a real horovodrun; builds Horovod first, once (cmake, g++, 5 minutes)"
	@echo "make test-exactly-once   200 submissions while the controller is killed 50 times (root)"
	@echo "make scale         a real Slurm of 64 nodes on this machine, a rank on each (root; NODES=16 for fewer)"
	@echo "make chaos         faults in the middle of a training, and the table of what came of them, docs/chaos.md (root)"
	@echo "make gpu           what needs a GPU, on a machine with one, and a report in build/gpu (PYTHON=python3 PART=1; CPU=1 tests the suite itself)"
	@echo "make cluster       start a real 4-node Slurm on this machine (root); make cluster-down ends it"
	@echo "make bench         submit latency and bring-up beside peers, tables and plots in build/; three hours (root)"
	@echo "make docs          the documentation as a site, in site/; its warnings are errors"
	@echo "make coverage      every test again under coverage.py: lines that they reach, by file, at least COVERAGE_FLOOR percent (TESTS=tests/facts for a part)"
	@echo "make lint          ruff, mypy, shellcheck"

demo: $(VENV)/job
	$(BIN)/python -m hpcinit.submit cluster=local nodes=2 ranks_per_node=2 job=train_gpt wait=true

test: $(VENV)/dev slurm lint
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST)
	$(MAKE) --no-print-directory test-deepspeed-0.18

# The developer's loop. What it leaves out are tests that start a cluster, ranks or jobs.
check: $(VENV)/dev lint
	$(BIN)/python -m pytest -n $(CHECK_WORKERS) -m 'not slurm and not chaos and not deepspeed' $(CHECKED) $(PYTEST)

# The tests of what DeepSpeed does, again with the oldest that we support. Only files with such tests are collected.
test-deepspeed-0.18: $(DS18)/made slurm
	$(DS18)/bin/python -m pytest -n $(PYTEST_WORKERS) -m deepspeed --deepspeed $(DS18_VERSION) \
		$$(grep -rl --include='test_*.py' 'mark\.deepspeed' tests) $(PYTEST)

# What hpcinit does with torch, with the oldest and the newest that we support.
.PHONY: test-torch
test-torch: $(TORCH_VERSIONS:%=$(VENV)/torch-%/made) slurm
	set -e; for version in $(TORCH_VERSIONS); do \
		$(VENV)/torch-$$version/bin/python -m pytest -n $(PYTEST_WORKERS) --torch $$version \
			tests/runtime tests/test_fork.py tests/test_equivalence.py $(PYTEST); \
	done

# What can be verified of torch's CUDA build without a GPU, and what its import costs beside the CPU build's.
CUDA_BUILD := $(VENV)/torch-$(lastword $(TORCH_VERSIONS))

.PHONY: test-cuda-build
test-cuda-build: $(CUDA_BUILD)/made $(DS18)/made
	HPCINIT_CUDA_BUILD=$(DS18) $(CUDA_BUILD)/bin/python -m pytest tests/cuda_build $(PYTEST)
	$(BIN)/python -m benchmarks.imports $(BIN)/python $(CUDA_BUILD)/bin/python

# Slurm, MPI and the shells that the tests use, those missing, from Debian's packages, where this is root; pytest
# says loudly what it left out where it is not.
slurm: $(VENV)/dev
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.minislurm install; fi

# What a login node does, with the oldest versions of the packages that it needs.
.PHONY: test-lowest
test-lowest: $(LOWEST)/made
	$(LOWEST)/bin/python -m pytest -m 'not slurm' tests/test_package.py tests/test_cli.py tests/test_every_command.py \
		tests/config tests/discover tests/submission tests/observe $(PYTEST)

# The same Slurm tests on Slurm 24.11, in a folder with Debian trixie that is made once (root; 640 MB, two minutes).
.PHONY: test-slurm24
test-slurm24: $(VENV)/dev
	$(BIN)/python -m tests.minislurm.trixie $(if $(MIRROR),--mirror $(MIRROR)) \
		$(BIN)/python -m pytest -m slurm $(PYTEST)

# A real Horovod, apart from make test: it is built from source, into a wheel that ~/.cache/hpcinit keeps.
.PHONY: test-horovod
test-horovod: $(VENV)/horovod/made
	$(VENV)/horovod/bin/python -m pytest tests/systems/test_horovod.py $(PYTEST)

# 200 submissions while the controller is killed 50 times (`make test` has 40 and 10); some minutes, root.
.PHONY: test-exactly-once
test-exactly-once: $(VENV)/dev slurm
	HPCINIT_EXACTLY_ONCE=200,50 $(BIN)/python -m pytest -s tests/slurm/test_exactly_once.py $(PYTEST)

# 64 nodes, each with a rank; some minutes on a quiet machine, 12 GB of memory. Root.
.PHONY: scale
scale: $(VENV)/dev slurm
	HPCINIT_SCALE=$(or $(NODES),64) $(BIN)/python -m pytest -s tests/test_many_nodes.py $(PYTEST)

# Faults in the middle of a training, and the table of what came of them; `make test` has a short form. Root.
.PHONY: chaos
chaos: $(VENV)/dev slurm
	HPCINIT_CHAOS=1 $(BIN)/python -m pytest tests/chaos $(PYTEST)

# Everything that needs a GPU, on a machine with one: no network, no installation, torch and numpy only. CPU=1: the suite
# itself, on CPUs. It uses .venv where there is one, unless PYTHON is given.
.PHONY: gpu
gpu: GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu:
	@$(GPU_PYTHON) -m tests.gpu --part $(or $(PART),all) --out $(or $(OUT),build/gpu) $(if $(CPU),--cpu) $(if $(ONLY),--only $(ONLY))

cluster: slurm
	@$(BIN)/python -m tests.minislurm up --nodes $(or $(NODES),4) $(if $(ACCOUNTING),--accounting)

cluster-down: $(VENV)/dev
	@$(BIN)/python -m tests.minislurm down

bench: $(VENV)/bench slurm
	$(BIN)/python -m benchmarks.submit
	$(BIN)/python -m benchmarks.sweep
	$(BIN)/python -m benchmarks.status
	$(BIN)/python -m benchmarks.bringup
	mkdir -p build
	$(BIN)/python -m benchmarks.store --json build/store.json
	$(BIN)/python -m benchmarks.formulas build/store.json --plot build/store.svg
	$(BIN)/python -m benchmarks.launch  # an hour; --ranks 2 8 --nodes 1 is quick
	$(BIN)/python -m benchmarks.launch --cold --out build/launch-cold
	$(BIN)/python -m benchmarks.steps
	$(BIN)/python -m benchmarks.nodelist

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck sbatch/*.sbatch examples/*/submit.sh hpcinit/submit/lib/*.sh .ci/run

# The lines that all tests or a part of them reach, in a table by file. A failed test is shown and does not count here: make
# test is for that. Few workers, since processes that are counted take twice the processor time.
.PHONY: coverage
coverage: $(VENV)/dev slurm
	rm -rf .coverage
	-$(BIN)/python -m coverage run -m pytest -n $(COVERAGE_WORKERS) $(TESTS) $(PYTEST)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report $(OF_CHECKOUT) --sort=cover --fail-under=$(COVERAGE_FLOOR)

.PHONY: docs
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

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
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation 'deepspeed>=0.18.5,<0.20'
	@touch $@

# What draws the benchmarks' plots.
$(VENV)/bench: $(VENV)/dev
	$(PIP) --editable '.[job,test,bench]'
	@touch $@

# Further environments: their own packages come first on sys.path, and the rest are those of the first one. Not pip's
# --target with PYTHONPATH: ranks get Slurm's environment, and each is started by the name of its Python.
ALONE := --quiet --disable-pip-version-check --ignore-installed --no-deps
define beside
rm -rf $(1)
$(BIN)/python -m venv --without-pip $(1)
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
endef

$(DS18)/made: $(VENV)/dev
	$(call beside,$(DS18))
	DS_BUILD_OPS=0 $(BIN)/python -m pip install $(ALONE) --prefix $(DS18) \
		--no-build-isolation deepspeed==$(DS18_VERSION)
	@touch $@

$(VENV)/torch-%/made: $(VENV)/dev
	$(call beside,$(@D))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --ignore-installed --prefix $(@D) \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$*
	@touch $@

$(LOWEST)/made: $(VENV)/dev tests/lowest.txt
	$(call beside,$(LOWEST))
	$(BIN)/python -m pip install $(ALONE) --prefix $(LOWEST) --requirement tests/lowest.txt
	@touch $@

$(VENV)/horovod/made: $(VENV)/dev tests/systems/horovod_wheel.py
	$(call beside,$(VENV)/horovod)
	wheel=$$($(BIN)/python -m tests.systems.horovod_wheel) && \
		$(BIN)/python -m pip install $(ALONE) --prefix $(VENV)/horovod "$$wheel"
	@touch $@
