"""Connects this rank to the other ranks: rank 0 starts a server, and the other ranks connect to it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.records import run_folder
from hpcinit.records.spec import Spec
from hpcinit.rendezvous import nonce, protocol
from hpcinit.rendezvous.rendezvous_client import Refused, RendezvousClient, RendezvousEndpoint
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.world import World, fingerprint, ports, rank_0


def join(world: World, spec: Spec | None, timeout: timedelta, generation: int) -> RendezvousEndpoint:
    """Find the other ranks of this attempt, and return this process's end of the rendezvous.

    Raise BringUpError if a rank is missing or was refused.

    generation: how many rendezvous this process has had before. Ranks connect only to ranks with the same number.
    """
    world = _with_candidate_ports(world)
    job = f"{world.job}#{generation}"
    folder = Path(os.environ[run_folder.ENV_FOLDER]) if spec else None
    secret, made_of = nonce.find(world, spec), fingerprint.fingerprint(folder)
    # Even without a secret, each job and restart has a different key.
    key = hashlib.sha256(f"{secret.text}|{world.job}".encode()).hexdigest()
    notes: list[str] = []

    def resolve() -> list[str]:
        """Return rank 0's addresses, the most likely one first. Store the note about this one in `notes`."""
        best, *others = rank_0.addresses(world, spec.comm.host_template if spec else "")
        notes[:] = [best.note] if best.note else []
        return [best.address, *(other.address for other in others)]

    if world.rank == 0:
        rank_0.check_master_addr(world)
        rank_0.publish(world, protocol.identity())
        found: RendezvousEndpoint = _open_server(
            resolve(), lambda address: RendezvousServer(world, address, key, job, made_of, secret.remove)
        )
        rank_0.publish(world, protocol.identity(), found.address)
    else:
        found = RendezvousClient(world, resolve, key, job, made_of, time.monotonic() + timeout.total_seconds())
    for note in notes:
        say(note)
    return found


def _with_candidate_ports(world: World) -> World:
    """Return `world` with a job name and several candidate ports.

    Some launchers (PMI without Hydra) provide no job name, so two jobs on a node would get the same ports and key. The
    name is then the id of the parent process, or the port if there are several nodes. Other launchers provide only one
    port, which the program itself needs. In both cases, compute the candidate ports from the job name.
    """
    job = world.job or (f"parent{os.getppid()}" if world.nodes == 1 else f"port{world.master_ports[0]}")
    if len(world.master_ports) == 1 or not world.job:
        return replace(world, job=job, master_ports=ports.of_job(os.environ, job))
    return world


def _open_server(places: list[str], open_at: Callable[[str], RendezvousServer]) -> RendezvousServer:
    """Start the server at the first of rank 0's addresses that belongs to this node."""
    problems: list[BringUpError] = []
    for place in places:
        try:
            return open_at(place)
        except Refused:
            raise  # another process acts as rank 0, so another address would not help
        except BringUpError as error:
            problems.append(error)
    raise BringUpError("\n".join(map(str, problems)), quoted="\n".join(one.quoted for one in problems))


def report_interval_s(world: World) -> float:
    """Return the seconds between two messages about missing ranks: as in torch, 10 s plus 1 s per thousand ranks."""
    return 10 + world.world_size / 1000
