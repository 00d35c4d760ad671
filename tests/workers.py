"""Distribute the tests among pytest-xdist's workers (`pytest -n 6`, as in `make test`).

A file's tests stay together, because its module fixtures (a cluster, a checkpoint of eight ranks) are expensive. Only
the files in APART, whose tests take long and share nothing, are divided. The files in DEAR start first, so that no
worker is left with a long one at the end. Each worker is a session and has a cluster if one of its tests uses the
fixture `slurm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# Files that take minutes, the longest first, from `pytest --cost` on a busy machine: only the order is reliable. A
# missing name costs minutes, never a test.
DEAR = (
    "tests/submit/test_restart_training.py",
    "tests/runtime/test_checkpoint.py",
    "tests/runtime/test_loader_workers.py",
    "tests/submit/test_chain.py",
    "tests/test_equivalence.py",
    "tests/chaos/test_chaos.py",
    "tests/runtime/test_bringup.py",
    "tests/runtime/test_heartbeat.py",
    "tests/runtime/test_checkpoint_slow.py",
    "tests/observe/test_why.py",
    "tests/submit/test_hostile.py",
    "tests/submit/test_resubmit.py",
    "tests/submit/test_submit.py",
    "tests/runtime/test_checkpoint_writers.py",
    "tests/submit/test_snapshot.py",
    "tests/submit/test_excluded_nodes.py",
    "tests/test_faults.py",
    "tests/submit/test_search.py",
    "tests/submit/test_sweep.py",
    "tests/slurm/test_exactly_once.py",
    "tests/test_main_job.py",
    "tests/submit/test_step_options.py",
    "tests/submit/test_secrets.py",
    "tests/submit/test_once.py",
    "tests/submit/test_restart.py",
    "tests/observe/test_state.py",
    "tests/test_cli.py",
    "tests/submit/test_validate.py",
    "tests/runtime/test_mesh.py",
    "tests/test_package.py",
    "tests/test_train_gpt.py",
    "tests/runtime/test_devices.py",
    "tests/test_world_command.py",
    "tests/runtime/test_full_disks.py",
    "tests/runtime/test_program.py",
    "tests/discover/test_discover.py",
    "tests/test_minislurm.py",
    "tests/test_sbatch.py",
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
