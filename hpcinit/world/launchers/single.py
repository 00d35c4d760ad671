"""A process that nothing launched: the only rank of its world."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcinit.world import World, ports
from hpcinit.world.parent_step import UNKNOWN, Process

NAME = "single"
VARIABLES: dict[str, str] = {}


def present(env: Mapping[str, str]) -> bool:
    return True


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    job = f"pid{os.getpid()}"
    return World(NAME, 0, 1, 0, 1, 0, ("127.0.0.1",), "127.0.0.1", ports.candidate_ports(job), job)
