"""`python -m hpcinit.fork SPEC`: runs the fork server of this node.

In a job with launch=fork it runs once per node: it imports the modules of launch.preload, forks the node's ranks and
supervises them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hpcinit import run
from hpcinit.base import processes, signals
from hpcinit.base.console import say
from hpcinit.base.errors import HpcinitError, RequestError
from hpcinit.base.text import counted
from hpcinit.cli.main import guarded
from hpcinit.launch import fork_server, preload, rank_binding
from hpcinit.launch.fork_server import ForkSupervisor, end_as
from hpcinit.launch.signal_monitor import SignalMonitor
from hpcinit.launch.warm_restart import WarmRestarts
from hpcinit.node import node_check
from hpcinit.records import run_folder, safeguards
from hpcinit.records.spec import Spec
from hpcinit.records.startup_timeout import check_clock
from hpcinit.world.launchers import slurm_step


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if argv else 2
    if len(argv) > 1:
        raise RequestError(f"{' '.join(argv)}: expected one argument, the {run_folder.SPEC} of a run folder")
    spec = run.enter(argv[0])
    if doubt := check_clock(os.environ, time.time()):
        say(doubt)
    here, folder = (
        slurm_step.fork_node(os.environ, spec.nodes, spec.ranks_per_node, spec.launch.spares),
        Path(os.environ[run_folder.ENV_FOLDER]),
    )
    if spec.stop.signal:  # keep the signal pending until there are ranks to receive it
        signals.block([signal.Signals[f"SIG{spec.stop.signal}"]])
    check = node_check.start(spec, os.environ)
    monitor = SignalMonitor()
    # Set the safeguards' variables before torch is imported, as hpcinit.run does.
    protected = safeguards.apply(os.environ, folder, slurm_step.identity(os.environ))
    cpus = _cpus_of_ranks(spec)
    if cpus is not None:  # OpenMP and BLAS count CPUs at import, and should count those of one rank
        rank_binding.apply(cpus[0])
    processes.set_title(f"hpcinit: fork server of {counted(spec.ranks_per_node, 'rank')}, {spec.name}")
    _set_import_path(spec)
    fork_server.announce_prefork(here, spec, folder)
    try:
        imported = preload.load(spec.launch.preload)
        node_check.finish(check, folder)
    except HpcinitError as error:
        fork_server.fail_prefork(here, spec, folder, error)
        raise
    restarts = WarmRestarts(here, spec, folder) if spec.launch.warm else None
    while True:
        supervisor = ForkSupervisor(here, spec.launch, folder, monitor, restarts)
        rank = supervisor.fork(partial(fork_server.become_child, here, spec, folder, cpus=cpus, restarts=restarts))
        if rank is not None:
            return run.become_rank(argv, spec, protected, imported)
        ended = supervisor.wait()
        status = ended if restarts is None else restarts.next_start(supervisor, ended)
        if status is not None:
            monitor.end()
            return end_as(status)
        if restarts is not None:
            here = restarts.here


def _cpus_of_ranks(spec: Spec) -> list[set[int]] | None:
    """Return the set of CPUs for each local rank, or None if every rank may use all CPUs of this process."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return rank_binding.cpus(spec.launch, spec.ranks_per_node, os.sched_getaffinity(0), os.environ)


def _set_import_path(spec: Spec) -> None:
    """Set sys.path[0] to the script's folder, so that the program's modules can be imported before the fork."""
    if spec.program.kind == "script":
        sys.path[0] = str(Path(spec.program.target).absolute().parent)


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.fork", sys.argv[1:]))
