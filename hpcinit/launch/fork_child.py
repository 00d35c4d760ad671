"""From the fork to a rank like any other: session, log, environment, CPUs, threads, random numbers, title."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcinit.base import process_limits
from hpcinit.launch import process_title, rank_binding
from hpcinit.records import rank_log, run_folder
from hpcinit.records.spec import Spec
from hpcinit.runtime.lifecycle import signal_watch
from hpcinit.world import forked
from hpcinit.world.forked import Node


def become_child(
    here: Node, spec: Spec, folder: Path, local_rank: int, parent: int, cpus: list[set[int]] | None
) -> None:
    """In the child, at once: local rank `local_rank` of `here`. cpus: of each local rank, None to leave them."""
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
    process_title.call_this(f"rank {rank}/{spec.world_size} {spec.name}")
    if spec.stop.signal and spec.program.kind != "command":
        signal_watch.hold(signal.Signals[f"SIG{spec.stop.signal}"])


def _open_log(path: Path) -> None:
    """stdout and stderr append to `path`, as srun's --open-mode=append has it, or stay the parent's where it cannot be
    opened. stdin is empty."""
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
    """As many threads as CPUs, unless OMP_NUM_THREADS says how many: torch has counted its parent's."""
    torch = sys.modules.get("torch")
    if torch is not None and cpus is not None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cpus)


def _own_random_numbers() -> None:
    """NumPy's global generator, if it is there: the ranks would all draw its parent's numbers.

    Python's own seeds itself after a fork, and torch begins with the same seed in every process.
    """
    generators = sys.modules.get("numpy.random")
    if generators is not None:
        generators.seed()
