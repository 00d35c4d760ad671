"""Distribute the tests among pytest-xdist's workers (`pytest -n 6`, as in `make test`).

`python -m tests.workers` prints how many workers this machine can have.

A file's tests stay together, because its module fixtures (a cluster, a checkpoint of eight ranks) are expensive. Only
the files in APART, whose tests take long and share nothing, are divided. The files in DEAR start first, so that no
worker is left with a long one at the end. Each worker is a session and has a cluster if one of its tests uses the
fixture `slurm`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# Files that take 45 seconds or longer, the longest first, from `pytest --cost` with 6 workers on 2 cores: only the order
# is reliable. A missing name costs minutes, never a test.
DEAR = (
    "tests/submit/test_restart_training.py",
    "tests/test_faults.py",
    "tests/submit/test_chain.py",
    "tests/observe/test_why.py",
    "tests/submit/test_once.py",
    "tests/runtime/test_loader_workers.py",
    "tests/runtime/test_checkpoint_slow.py",
    "tests/runtime/test_checkpoint.py",
    "tests/runtime/test_elastic.py",
    "tests/test_every_command.py",
    "tests/docs/test_pages_run.py",
    "tests/chaos/test_chain_faults.py",
    "tests/runtime/test_heartbeat.py",
    "tests/chaos/test_many_restarts.py",
    "tests/test_equivalence.py",
    "tests/test_hydra_launcher.py",
    "tests/test_world_command.py",
    "tests/test_sbatch.py",
    "tests/chaos/test_chaos.py",
    "tests/test_examples.py",
    "tests/test_wrong_world_size.py",
    "tests/why/test_slurm_ends.py",
    "tests/runtime/test_stopping.py",
    "tests/test_main_job.py",
    "tests/config/test_messages.py",
    "tests/chaos/test_saves.py",
    "tests/third_party/test_programs.py",
    "tests/test_package.py",
    "tests/test_gpu_suite.py",
    "tests/runtime/test_signal_in_a_phase.py",
    "tests/submit/test_once_as_a_user.py",
    "tests/test_train_gpt.py",
    "tests/test_minislurm.py",
    "tests/slurm/test_clusters.py",
    "tests/runtime/test_wrap_deepspeed.py",
    "tests/observe/test_stacks.py",
    "tests/submit/test_hetjob.py",
    "tests/why/test_hang_verdict.py",
    "tests/systems/test_launches.py",
    "tests/runtime/test_bringup.py",
    "tests/test_node_check.py",
    "tests/submit/test_program_use.py",
    "tests/test_api.py",
    "tests/test_replayed_pages.py",
    "tests/submit/test_time_left.py",
    "tests/submit/test_restart.py",
    "tests/chaos/test_full_disks.py",
    "tests/chaos/test_exits.py",
    "tests/runtime/test_devices.py",
    "tests/slurm/test_exactly_once.py",
    "tests/doctor/test_on_nodes.py",
    "tests/systems/test_openrlhf.py",
    "tests/observe/test_state.py",
    "tests/submit/test_validate.py",
    "tests/observe/test_why_silent.py",
    "tests/records/test_memory.py",
    "tests/test_completion.py",
    "tests/submit/test_suspended.py",
    "tests/test_fork.py",
    "tests/runtime/test_wrap_native.py",
    "tests/runtime/test_fork.py",
    "tests/report/test_report.py",
    "tests/test_orphans.py",
    "tests/submit/test_search.py",
    "tests/test_no_home.py",
)
APART: frozenset[str] = frozenset()


def scope(nodeid: str) -> str:
    """Return the part of a test's identifier that it shares with the tests on the same worker."""
    file = nodeid.partition("::")[0]
    return nodeid if file in APART else file


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # only in a worker of xdist's
        return
    place = {name: number for number, name in enumerate(DEAR)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling | None:
    if config.option.dist != "load":  # the user chose another one
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # xdist's own order is by the number of tests
    return ByFile(config, log)


# Tests mostly wait for Slurm and for other ranks, so there are more workers than cores. A worker with its cluster and
# its ranks used up to 2.2 GB.
PER_CORE, GB_PER_WORKER = 3, 2.3
# Memory limits of control groups, version 2 and 1; each is below one of these folders, at the path in /proc/self/cgroup.
LIMITS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


def number_of_workers(cores: int, available_gb: float) -> int:
    """Return as many workers as cores and memory allow, at least 1."""
    return max(1, min(PER_CORE * cores, int(available_gb / GB_PER_WORKER)))


def available_gb() -> float:
    """Return the memory that the tests may use: what is available, at most the limit of this process's control groups."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(words["MemAvailable"].split()[0]) * 1024 / 1e9]
    groups = [line.rpartition(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for top, name in LIMITS:
        for group in ("", *groups):
            try:
                found.append(int(Path(top + group, name).read_text()) / 1e9)
            except (OSError, ValueError):  # another version, or "max"
                continue
    return min(found)


if __name__ == "__main__":
    print(number_of_workers(len(os.sched_getaffinity(0)), available_gb()))
