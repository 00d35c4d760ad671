"""Starts Horovod for ranks started by horovodrun, or by mpirun with HPCINIT_STARTED_BY=horovod."""

from __future__ import annotations

import importlib

from hpcinit.world import World
from hpcinit.world.launchers.mpi import check_horovod, horovod


def start_horovod(world: World) -> None:
    """Call hvd.init(), as every program under horovodrun must, unless this process has already called it.

    Call it after all ranks have connected, because hvd.init() waits for each of them and names none. Do nothing under
    another launcher, or if this Python's Horovod was built without torch. Raise WorldError if Horovod reports another
    rank or size.
    """
    if world.launcher != horovod.NAME:
        return
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError:
        return
    if not hvd.is_initialized():
        hvd.init()
    check_horovod(world)
