# `make demo` and `make test` create their environment. They need Python (3.10 or newer), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The oldest supported DeepSpeed, in an environment that uses the other packages of the first one.
DS18_VERSION := 0.18.5
DS18 := $(VENV)/deepspeed-$(DS18_VERSION)

# The oldest and the newest supported torch, each in an environment that uses the other packages of the first one. PyPI has
# CUDA builds of 5.5 GB each; TORCH_INDEX=https://download.pytorch.org/whl/cpu has small CPU builds.
TORCH_VERSIONS ?= 2.10.0 2.15.0
TORCH_INDEX ?=

# As many as cores and memory allow (tests/workers.py). 0: one test after the other.
PYTEST_WORKERS ?= $(shell $(BIN)/python -m tests.workers)

COVERAGE_WORKERS ?= 3

# make check runs the tests that need neither Slurm nor torch processes; most of its work is in pytest's own processes.
CHECK_WORKERS ?= 2
CHECKED := $(addprefix tests/,base records world ds_config slurm why config docs discover doctor) \
	$(addprefix tests/submit/test_,$(addsuffix .py,environment folder plan provenance script syntax)) \
	$(addprefix tests/test_,$(addsuffix .py,cli completion decoding imports names package readme security_page workers))

# Minimum share of hpcinit's lines that tests must execute, in percent, including their child processes:
# docs/decisions/0021-how-the-tests-run.md. There is no minimum without root (no Slurm) or for a part of the tests.
COVERAGE_FLOOR ?= $(if $(strip $(TESTS)$(PYTEST)),0,$(if $(filter 0,$(shell id -u)),92,0))

# Excludes the wheel that a test installs, and code snapshots of runs.
OF_CHECKOUT := --include='hpcinit/*'

LOWEST := $(VENV)/lowest

# The next minor version of Hydra and OmegaConf, before its release, and the Optuna sweeper that needs it.
HYDRA_NEXT ?= 'hydra-core>=1.4.0rc3,<1.5' 'omegaconf>=2.4.1rc1,<2.5' 'hydra-optuna-sweeper>=1.4.0rc3,<1.5' 'optuna>=4.9,<6'

.PHONY: help demo test check test-deepspeed-0.18 slurm cluster cluster-down bench lint clean

help:
	@echo "make demo          train a small GPT on this machine, with 2 simulated nodes x 2 ranks"
	@echo "make check         lint, types, and the tests without Slurm and without torch processes: two minutes"
	@echo "make test          lint and every test; as root also on a real Slurm, which it installs (PYTEST_WORKERS=0: one by one)"
	@echo "make test-all      make test with more cases of each kind, then other versions of Slurm, Python's packages, Apptainer, ...; before a release"
	@echo "make test-anywhere  the tests that depend on where the checkout is, in clones in /tmp, below a home folder, as another user, ..."
	@echo "make test-deepspeed-0.18  the DeepSpeed tests with $(DS18_VERSION), the oldest supported version"
	@echo "make test-torch    a part of the tests with torch $(firstword $(TORCH_VERSIONS)) and $(lastword $(TORCH_VERSIONS)), the oldest and the newest supported version; installs them once (11 GB)"
	@echo "make test-newest-torch  the same with the newest torch on the package index"
	@echo "make test-cuda-build  torch's CUDA build without a GPU: imports before a fork, variables, formats (5.5 GB, once)"
	@echo "make test-slurm24  the Slurm tests again on Slurm 24.11 (root; makes a folder with Debian trixie, once)"
	@echo "make test-slurm26  the same on Slurm 26.05, from Debian forky"
	@echo "make test-python314  every test with Python 3.14 and the next Hydra, from Debian forky (root; 10 GB, once)"
	@echo "make test-apptainer  a real Apptainer runs the ranks of a job on the real Slurm (root; Debian sid, once)"
	@echo "make test-lowest   the tests of the login node with the oldest supported versions of its packages"
	@echo "make test-hydra-next  the same with the pre-releases of Hydra 1.4 and OmegaConf 2.4"
	@echo "make test-horovod  a real Horovod over Gloo and MPI; builds it first, once (cmake, g++, libopenmpi-dev, 5 minutes)"
	@echo "make test-nccl     the interface that a real NCCL takes, on virtual nodes; installs NCCL once (300 MB, root)"
	@echo "make test-submitit  submitit's own tests of executors and jobs, with hpcinit's executors"
	@echo "make test-ray      four Ray actors train with DeepSpeed; installs Ray first, once"
	@echo "make test-exactly-once   200 submissions while the controller is killed 50 times (root)"
	@echo "make scale         a real Slurm of 64 nodes on this machine, a rank on each (root; NODES=16 for fewer)"
	@echo "make chaos         faults during training runs, and a table of the results, docs/development/chaos.md (root)"
	@echo "make soak          a training run on 4 nodes x 2 ranks with a random fault every EVERY_S=300 seconds, for MINUTES=90, then the same without a fault (root)"
	@echo "make gpu           the GPU tests, on a machine with a GPU, with a report in build/gpu (PYTHON=python3 PART=1; CPU=1 tests the suite itself)"
	@echo "make corpus        the answers of hpcinit why to over 700 labeled logs, dumps and run folders, in a table (CORPUS='--list wrong')"
	@echo "make cluster       start a real 4-node Slurm on this machine (root); make cluster-down ends it"
	@echo "make bench         submit latency and start-up compared with other tools, tables and plots in build/; three hours (root)"
	@echo "make release-check  build the sdist and the wheel, check them, and install both with each supported Python"
	@echo "make docs          build the documentation site in site/; warnings are errors"
	@echo "make coverage      run all tests under coverage.py and print the executed lines by file, at least COVERAGE_FLOOR percent (TESTS=tests/records for a part)"
	@echo "make lint          ruff, mypy, shellcheck, and a lint of the English in code and pages"

demo: $(VENV)/job
	$(BIN)/python -m hpcinit.submit cluster=local nodes=2 ranks_per_node=2 job=train_gpt wait=true
	@echo
	@echo "Next, on the login node of a Slurm cluster, in the environment of your program:"
	@echo "  pip install $(CURDIR)"
	@echo "  hpcinit discover --name mycluster                                       # write conf/cluster/mycluster.yaml"
	@echo "  hpcinit submit cluster=mycluster nodes=2 dry_run=true -- your_script.py  # print the script, submit nothing"
	@echo "  hpcinit submit cluster=mycluster nodes=2 -- your_script.py"

test: $(VENV)/dev slurm lint
	$(BIN)/python -m tests.second_try -n $(PYTEST_WORKERS) $(PYTEST)

# The quick check during development. It skips tests that start a cluster, ranks or jobs.
check: $(VENV)/dev lint
	$(BIN)/python -m pytest -n $(CHECK_WORKERS) -m 'not slurm and not chaos and not deepspeed and not ranks' $(CHECKED) $(PYTEST)

# What is too slow or too large for each change. Not in it: test-torch and test-cuda-build, which download 11 GB.
.PHONY: test-all
test-all: $(VENV)/dev slurm lint
	$(BIN)/python -m tests.second_try -n $(PYTEST_WORKERS) --all $(PYTEST)
	set -e; for each in deepspeed-0.18 lowest hydra-next slurm24 slurm26 apptainer horovod nccl ray exactly-once anywhere; do \
		$(MAKE) --no-print-directory test-$$each; \
	done

# The tests that depend on where the checkout is, each time in another place: tests/anywhere.py. PLACES="tmp home" for some.
.PHONY: test-anywhere
test-anywhere: $(VENV)/dev slurm
	$(BIN)/python -m tests.anywhere $(PLACES)

# The tests of DeepSpeed, again with the oldest supported version. Only files with such tests are collected.
test-deepspeed-0.18: $(DS18)/made slurm
	$(DS18)/bin/python -m tests.second_try -n $(PYTEST_WORKERS) -m deepspeed --deepspeed $(DS18_VERSION) \
		$$(grep -rl --include='test_*.py' 'mark\.deepspeed' tests) $(PYTEST)

# The tests of hpcinit's use of torch, with the oldest and the newest supported version.
.PHONY: test-torch
test-torch: $(TORCH_VERSIONS:%=$(VENV)/torch-%/made) slurm
	set -e; for version in $(TORCH_VERSIONS); do \
		$(VENV)/torch-$$version/bin/python -m pytest -n $(PYTEST_WORKERS) --torch $$version \
			tests/runtime tests/test_fork.py tests/test_equivalence.py $(PYTEST); \
	done

# The same with the newest torch of the registry, which may not be supported yet.
.PHONY: test-newest-torch
test-newest-torch: $(VENV)/dev
	newest=$$($(BIN)/python -m pip index versions torch 2>/dev/null | sed -n '1s/.*(\(.*\))/\1/p') && \
		$(MAKE) --no-print-directory test-torch TORCH_VERSIONS="$$newest"

# Tests of torch's CUDA build that need no GPU, and its import time compared with the CPU build.
CUDA_BUILD := $(VENV)/torch-$(lastword $(TORCH_VERSIONS))

.PHONY: test-cuda-build
test-cuda-build: $(CUDA_BUILD)/made $(DS18)/made
	HPCINIT_CUDA_BUILD=$(DS18) $(CUDA_BUILD)/bin/python -m pytest tests/cuda_build $(PYTEST)
	$(BIN)/python -m benchmarks.imports $(BIN)/python $(CUDA_BUILD)/bin/python

# Builds the sdist and the wheel, checks and installs them: docs/development/release.md. OUT=dist keeps them.
.PHONY: release-check
release-check: $(VENV)/release
	$(BIN)/python -m tests.release $(if $(OUT),--out $(OUT)) $(RELEASE)

# As root, installs missing Debian packages for the tests: Slurm, MPI and shells. Without root, pytest prints which tests
# it skipped.
slurm: $(VENV)/dev
	@if [ "$$(id -u)" = 0 ]; then $(BIN)/python -m tests.minislurm install; fi

# The tests of the login node, with the oldest supported versions of its packages.
.PHONY: test-lowest
test-lowest: $(LOWEST)/made
	$(LOWEST)/bin/python -m pytest -m 'not slurm' tests/test_package.py tests/test_cli.py tests/test_every_command.py \
		tests/config tests/discover tests/submit tests/observe $(PYTEST)

# The same with the next Hydra and OmegaConf, which pip does not install before their release.
.PHONY: test-hydra-next
test-hydra-next: $(VENV)/hydra-next/made
	$(VENV)/hydra-next/bin/python -m pytest -m 'not slurm' tests/test_package.py tests/test_cli.py \
		tests/test_every_command.py tests/test_hydra_launcher.py tests/config tests/discover tests/submit tests/observe $(PYTEST)

# The Slurm tests on a newer Slurm, in a folder with the Debian that has it, created once (root; 640 MB, two minutes).
.PHONY: test-slurm24 test-slurm26
test-slurm24: SUITE := trixie
test-slurm26: SUITE := forky
test-slurm24 test-slurm26: $(VENV)/dev
	$(BIN)/python -m tests.minislurm.newer_debian --suite $(SUITE) $(if $(MIRROR),--mirror $(MIRROR)) \
		$(BIN)/python -m pytest -m slurm $(PYTEST)

# Python 3.14 of Debian forky, with torch from PyPI and the next Hydra, which it needs (root; 10 GB, once).
.PHONY: test-python314
test-python314: FORKY = $(BIN)/python -m tests.minislurm.newer_debian --suite forky $(if $(MIRROR),--mirror $(MIRROR))
test-python314: $(VENV)/python3.14/made
	$(FORKY) $(VENV)/python3.14/bin/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST)

# A real Apptainer runs the ranks of a Slurm job, in a folder with Debian sid, which has both (root).
.PHONY: test-apptainer
test-apptainer: $(VENV)/dev
	$(BIN)/python -m tests.minislurm.newer_debian --suite sid $(if $(MIRROR),--mirror $(MIRROR)) \
		$(BIN)/python -m pytest tests/systems/test_apptainer.py $(PYTEST)

# Tests with a real Horovod, not part of make test: it is built from source, into a wheel in ~/.cache/hpcinit.
.PHONY: test-horovod
test-horovod: $(VENV)/horovod/made
	$(VENV)/horovod/bin/python -m pytest tests/systems/test_horovod.py $(PYTEST)

# NCCL without a GPU chooses its network interface: the checks of nodes on it, with network namespaces as nodes.
.PHONY: test-nccl
test-nccl: $(VENV)/nccl/made slurm
	$(VENV)/nccl/bin/python -m pytest tests/systems/test_nccl.py $(PYTEST)

# submitit's own tests, with hpcinit's executors. tests/submitit_suite/expected.txt has the expected results.
.PHONY: test-submitit
test-submitit: $(VENV)/dev
	$(BIN)/python -m tests.submitit_suite -n 2 $(PYTEST)

# Four Ray actors train with DeepSpeed. Ray is large, so this is not part of `make test`; it is installed beside the venv.
.PHONY: test-ray
test-ray: $(VENV)/dev
	test -e $(VENV)/ray/ray || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/ray ray jsonschema jsonschema-specifications protobuf referencing rpds-py
	RAY_AUTH_MODE=disabled PYTHONPATH=$(VENV)/ray $(BIN)/python tests/systems/programs/ray_actors.py

# 200 submissions while the controller is killed 50 times (`make test` has 40 and 10); some minutes, root.
.PHONY: test-exactly-once
test-exactly-once: $(VENV)/dev slurm
	HPCINIT_EXACTLY_ONCE=200,50 $(BIN)/python -m pytest -s tests/slurm/test_exactly_once.py $(PYTEST)

# 64 nodes, each with a rank; some minutes on a quiet machine, 12 GB of memory. Root.
.PHONY: scale
scale: $(VENV)/dev slurm
	HPCINIT_SCALE=$(or $(NODES),64) $(BIN)/python -m pytest -s tests/test_many_nodes.py $(PYTEST)

# Faults during training runs, and a table of their results; `make test-all` runs some of them. Root.
.PHONY: chaos
chaos: $(VENV)/dev slurm
	HPCINIT_CHAOS=1 $(BIN)/python -m pytest tests/chaos $(PYTEST)

# A long training run with random faults; tests/chaos/soak.py. SOAK="--seed 7" repeats one.
.PHONY: soak
soak: $(VENV)/dev slurm
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),90) --every $(or $(EVERY_S),300) $(SOAK)

# All tests that need a GPU, without a network and without an installation, with torch and numpy only. CPU=1 tests the
# suite itself on CPUs. It uses .venv if it exists, unless PYTHON is given.
.PHONY: gpu
gpu: GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
gpu:
	@$(GPU_PYTHON) -m tests.gpu --part $(or $(PART),all) --out $(or $(OUT),build/gpu) $(if $(CPU),--cpu) $(if $(ONLY),--only $(ONLY))

# How often `hpcinit why` finds the cause of the labeled cases in tests/corpus; --list wrong prints them. Six minutes.
.PHONY: corpus
corpus: $(VENV)/dev
	@$(BIN)/python -m tests.corpus $(CORPUS)

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
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.links
	$(BIN)/shellcheck sbatch/*.sbatch examples/*/submit.sh hpcinit/submit/lib/*.sh tests/runtime/*.sh .ci/run

# A table of the lines that all tests, or a part, execute. A failing test is shown but is not an error here. There are few
# workers, because measured processes take twice the CPU time.
.PHONY: coverage
coverage: $(VENV)/dev slurm
	rm -rf .coverage
	-$(BIN)/python -m coverage run -m pytest -n $(COVERAGE_WORKERS) $(TESTS) $(PYTEST)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report $(OF_CHECKOUT) --sort=cover --fail-under=$(COVERAGE_FLOOR)

.PHONY: docs
docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV)

# The stamp files record what is installed; pyproject.toml and constraints.txt define what should be.
$(VENV)/job: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[job]'
	@touch $@

# DeepSpeed's source package imports torch to build itself, so build isolation is off. Its ops are not built.
# tests/fast_exit.pth: docs/decisions/0021-how-the-tests-run.md.
$(VENV)/dev: $(VENV)/job tests/fast_exit.pth
	$(PIP) --editable '.[job,test]' setuptools wheel ninja
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation 'deepspeed>=0.18.5,<0.20'
	cp tests/fast_exit.pth "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

$(VENV)/release: $(VENV)/dev
	$(PIP) --editable '.[job,test,release]'
	@touch $@

# The packages for the benchmarks' plots.
$(VENV)/bench: $(VENV)/dev
	$(PIP) --editable '.[job,test,bench]'
	@touch $@

# More environments: their own packages are first on sys.path, the others are those of the first environment. pip's
# --target with PYTHONPATH would not work, because hpcinit starts ranks by their Python, not with PYTHONPATH. The .pth file
# has the folder as a path, which hpcinit's check reads, and as a call, which reads the .pth files in it.
ALONE := --quiet --disable-pip-version-check --ignore-installed --no-deps
define beside
rm -rf $(1)
$(BIN)/python -m venv --without-pip $(1)
$(BIN)/python -c 'import sysconfig; print("{0}\nimport site; site.addsitedir({0!r})".format(sysconfig.get_path("purelib")))' \
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

$(VENV)/hydra-next/made: $(VENV)/dev Makefile
	$(call beside,$(VENV)/hydra-next)
	$(BIN)/python -m pip install $(ALONE) --prefix $(VENV)/hydra-next $(HYDRA_NEXT)
	@touch $@

# The folder is in the checkout, and its Python is /usr/bin/python3.14 of Debian's folder.
PIP314 := $(VENV)/python3.14/bin/python -m pip install --quiet --disable-pip-version-check
$(VENV)/python3.14/made: $(VENV)/dev
	rm -rf $(@D)
	$(BIN)/python -m tests.minislurm.newer_debian --suite forky --network $(if $(MIRROR),--mirror $(MIRROR)) sh -ec '\
		python3.14 -m venv $(@D); \
		$(PIP314) --editable ".[job,test]" setuptools wheel ninja hatchling hatch-vcs $(subst ','"'"',$(HYDRA_NEXT)); \
		DS_BUILD_OPS=0 $(PIP314) --no-build-isolation "deepspeed>=0.18.5,<0.20"; \
		cp tests/fast_exit.pth "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path(\"purelib\"))")"'
	@touch $@

$(VENV)/nccl/made: $(VENV)/dev
	$(call beside,$(VENV)/nccl)
	$(BIN)/python -m pip install $(ALONE) --prefix $(VENV)/nccl nvidia-nccl-cu13
	@touch $@

$(VENV)/horovod/made: $(VENV)/dev tests/systems/horovod_wheel.py
	$(call beside,$(VENV)/horovod)
	wheel=$$($(BIN)/python -m tests.systems.horovod_wheel) && \
		$(BIN)/python -m pip install $(ALONE) --prefix $(VENV)/horovod "$$wheel"
	@touch $@
