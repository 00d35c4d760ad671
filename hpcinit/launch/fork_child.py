"""What turns a forked child into a rank: session, log, environment, CPUs, threads, random numbers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcinit.base import process_limits
from hpcinit.launch import rank_binding
from hpcinit.records import rank_log, run_folder
from hpcinit.records.spec import Spec
from hpcinit.runtime.lifecycle import signal_watch
from hpcinit.world import forked
from hpcinit.world.forked import Node


def become_child(
    here: Node, spec: Spec, folder: Path, local_rank: int, parent: int, cpus: list[set[int]] | None
) -> None:
    """Set up local rank `local_rank` of `here`, first thing in the child. cpus: per local rank; None: unchanged."""
    os.setsid()
    process_limits.die_with_parent_process(parent)
    rank = here.first + local_rank
    _open_log(folder / run_folder.RANK_LOG.format(rank=rank))
    env = forked.environment(os.environ, here, local_rank, os.getpid(), spec.launch.cpus)
    _exchange_environment({**env, **rank_binding.devices(spec.launch, local_rank, env)})
    if cpus is not None:
        rank_binding.apply(cpus[local_rank])
    _own_threads(None if cpus is None else len(cpus[local_rank]))
    _own_random_numbers()
    if spec.stop.signal and spec.program.kind != "command":
        signal_watch.hold(signal.Signals[f"SIG{spec.stop.signal}"])


def _open_log(path: Path) -> None:
    """Append stdout and stderr to `path`, like srun's --open-mode=append, or keep the parent's if that fails. stdin is
    empty."""
    with rank_log.opened(path) as log, open(os.devnull, "rb") as nothing:  # noqa: PTH123 - no path
        os.dup2(nothing.fileno(), 0)
        if log is not None:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)


def _exchange_environment(env: Mapping[str, str]) -> None:
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in env.items() if os.environ.get(name) != value})


def _own_threads(cpus: int | None) -> None:
    """Use as many threads as CPUs, unless OMP_NUM_THREADS is set: torch has counted the CPUs of the fork server."""
    torch = sys.modules.get("torch")
    if torch is not None and cpus is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cpus)


def _own_random_numbers() -> None:
    """Seed NumPy's global generator, if it is imported: all ranks would get the same numbers from their parent.

    Python's generator seeds itself after a fork, and torch's has the same seed in every process anyway.
    """
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed()
