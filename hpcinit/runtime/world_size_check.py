"""Warns if hpcinit.init() is about to create a process group with fewer or more ranks than the job."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from hpcinit.base.console import say
from hpcinit.records import components, run_folder, world_size
from hpcinit.records.spec import load
from hpcinit.records.world_size import WrongWorldSize
from hpcinit.world import ENV_WORLD, World, launchers
from hpcinit.world.launchers.torch_variables import torchrun


def check_own_group(env: Mapping[str, str], world: World) -> None:
    """Print and record a warning if this process is rank 0 of a group whose size does not match the job. Never raise.

    Also warn about a group of the right size if several ranks of a node each run a launcher.
    """
    folder = env.get(run_folder.ENV_FOLDER)
    if not folder or world.rank != 0 or env.get(launchers.ENV_STARTED_BY):  # the user has chosen this group
        return
    with contextlib.suppress(Exception):  # a check must never end a training run
        spec = load(Path(folder) / run_folder.SPEC)
        nodes = world.nodes if world.launcher == torchrun.NAME else spec.nodes  # other launchers may not know it
        in_each_rank = env.get("SLURM_LOCALID", "0") != "0"
        if world.job != env.get(ENV_WORLD) and (in_each_rank or world_size.differs(spec, world.world_size, nodes)):
            launcher = {"env": "another launcher", "single": "no launcher"}.get(world.launcher, world.launcher)
            host, shape = world.host or os.uname().nodename, components.shape(spec.parts)
            found = WrongWorldSize(launcher, world.world_size, host, os.getpid(), spec.world_size, shape)
            say(f"warning: {found}")
            world_size.record(Path(folder), found)
