"""A node's ranks before they are forked: what others are told of them while their parent imports, and if that fails."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from pathlib import Path

from hpcinit.facts import forked, launchers, runfolder
from hpcinit.facts.errors import HpcinitError
from hpcinit.facts.forked import Node
from hpcinit.facts.spec import Spec
from hpcinit.facts.timeouts import left_of_job
from hpcinit.facts.world import World
from hpcinit.runtime import moments, program, rendezvous


def announce(here: Node, spec: Spec, folder: Path) -> None:
    """In the timeline: they have come as far as their parent. One that hangs in an import is found there."""
    for local_rank in range(here.ranks_per_node):
        moments.announce(_world(here, spec, local_rank), folder)


def fail(here: Node, spec: Spec, folder: Path, error: HpcinitError) -> None:
    """As the first of them would: leave the error in its log and its record, and tell it to others that go on."""
    world = _world(here, spec, 0)
    with contextlib.suppress(OSError), (folder / runfolder.RANK_LOG.format(rank=world.rank)).open("a") as log:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__, file=log)
        log.write(f"hpcinit: error: {error}\n")
    program.record(error, world)
    if not spec.launch.kill_on_bad_exit:  # else Slurm ends them, and nobody is to wait for rank 0's door
        timeout = spec.comm.timeout.start_up(world.nodes, left_of_job(os.environ, time.time()))
        with contextlib.suppress(HpcinitError):
            rendezvous.meet(world, spec, timeout)
            rendezvous.leave(str(error))


def _world(here: Node, spec: Spec, local_rank: int) -> World:
    return launchers.read(forked.environment(os.environ, here, local_rank, os.getpid(), spec.launch.cpus))
