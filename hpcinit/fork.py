"""`python -m hpcinit.fork SPEC`

Inside a job with launch=fork, one per node: import what launch.preload lists, fork the node's ranks, look after them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpcinit import run
from hpcinit.cli import guarded
from hpcinit.facts import forked, runfolder, safeguards, signals
from hpcinit.facts.errors import HpcinitError, RequestError
from hpcinit.facts.launchers import slurm
from hpcinit.facts.saying import say
from hpcinit.facts.spec import Spec
from hpcinit.facts.timeouts import check_clock
from hpcinit.runtime.fork import binding, child, preload, process, unborn
from hpcinit.runtime.fork.family import Family, end_as
from hpcinit.runtime.fork.witness import Witness


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if argv else 2
    if len(argv) > 1:
        raise RequestError(f"{' '.join(argv)}: expected SPEC alone, a run folder's {runfolder.SPEC}")
    spec = run.enter(argv[0])
    if doubt := check_clock(os.environ, time.time()):
        say(doubt)
    here, folder = forked.node(os.environ, spec.nodes, spec.ranks_per_node), Path(os.environ[runfolder.ENV_FOLDER])
    if spec.stop.signal:  # it waits until there are ranks that hear it
        signals.block([signal.Signals[f"SIG{spec.stop.signal}"]])
    witness = Witness()
    # As hpcinit.run: before torch is imported.
    protected = safeguards.apply(os.environ, folder, slurm.identity(os.environ))
    cpus = _shares(spec)
    if cpus is not None:  # what counts CPUs when it is imported (OpenMP, BLAS) counts a rank's
        binding.apply(cpus[0])
    process.call_this(f"hpcinit: parent of {spec.ranks_per_node} ranks, {spec.name}")
    _look_where_the_program_does(spec)
    unborn.announce(here, spec, folder)
    try:
        imported = preload.load(spec.launch.preload)
    except HpcinitError as error:
        unborn.fail(here, spec, folder, error)
        raise
    if imported and here.rank == 0:
        say(imported)
    family = Family(here, spec.launch, folder, witness)
    rank = family.fork(lambda local, parent: child.become(here, spec, folder, local, parent, cpus))
    if rank is None:
        return end_as(family.wait())
    return run.become_rank(argv, spec, protected)


def _shares(spec: Spec) -> list[set[int]] | None:
    if not hasattr(os, "sched_getaffinity"):
        return None
    return binding.cpus(spec.launch, spec.ranks_per_node, os.sched_getaffinity(0), os.environ)


def _look_where_the_program_does(spec: Spec) -> None:
    """sys.path[0] as the program will have it, so that its own modules can be imported before the fork."""
    if spec.program.kind == "script":
        sys.path[0] = str(Path(spec.program.target).absolute().parent)


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.fork", sys.argv[1:]))
