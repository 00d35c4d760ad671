"""The ports that the user has fixed with `comm.ports`, for sites whose firewall opens only some ports.

The batch script exports the value as HPCINIT_PORTS. Rank 0's node then uses no other ports for the rendezvous, torch's
store and MASTER_PORT. gloo and NCCL still choose ports of the kernel's range for the connections between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from hpcinit.base.errors import WorldError
from hpcinit.world import World, network, number

ENV_PORTS = "HPCINIT_PORTS"
FROM_ENV = "env"  # the user's own MASTER_PORT, and MASTER_ADDR if it is set
NEEDED = 3  # the rendezvous, torch's store, and the program's MASTER_PORT
EXPECTED = f"a port, as in 29500, a range of {NEEDED} or more, as in 20000-20100, or {FROM_ENV}"


def problem(text: str) -> str:
    """Return why `text` is not a value of comm.ports, as a message without its name; '' if it is one."""
    if text == FROM_ENV:
        return ""
    first, dash, last = text.partition("-")
    words = (first, last) if dash else (first, first)
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        return f"is {text!r}, expected {EXPECTED}"
    low, high = int(first), int(last) if dash else int(first) + NEEDED - 1
    if not 1024 <= low <= high <= 65535:
        return f"is {text!r}, expected ports from 1024 to 65535, the lower one first"
    if high - low + 1 < NEEDED:
        return (
            f"is {text!r}, {high - low + 1} ports, expected {NEEDED} or more: for the rendezvous, torch's store and "
            "MASTER_PORT"
        )
    return ""


def candidates(text: str, job: str) -> tuple[int, ...]:
    """Return the candidate ports for one start of one job. One port means this one as MASTER_PORT, and the next two."""
    first, dash, last = text.partition("-")
    low = int(first)
    if not dash:
        return low + 1, low, low + 2  # the rendezvous uses the first free one, and MASTER_PORT is the next
    size = int(last) - low + 1
    start = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big") % size
    return tuple(low + (start + i) % size for i in range(min(size, network.PORT_COUNT)))


def of_job(env: Mapping[str, str], job: str) -> tuple[int, ...]:
    """Return the candidate ports for one start of one job, the same on every rank: the fixed ones, or hpcinit's.

    Raise WorldError if HPCINIT_PORTS is not valid.
    """
    text = env.get(ENV_PORTS, "")
    if not text:
        return network.candidate_ports(job)
    if reason := problem(text):
        raise WorldError(f"{ENV_PORTS} {reason} (comm.ports in the config sets it)")
    if text == FROM_ENV:
        text = str(number(env, "MASTER_PORT", f"{ENV_PORTS}={FROM_ENV} (comm.ports in the config) requires it"))
        if reason := problem(text):
            raise WorldError(f"MASTER_PORT {reason}")
    return candidates(text, job)


def fixed(env: Mapping[str, str], world: World) -> World:
    """Return `world` with the user's ports, and with the user's MASTER_ADDR if HPCINIT_PORTS=env requests it."""
    if not env.get(ENV_PORTS) or len(world.master_ports) == 1:  # a single port is already the user's or torchrun's
        return world
    address = env.get("MASTER_ADDR") if env[ENV_PORTS] == FROM_ENV else None
    world = replace(world, master_ports=of_job(env, world.job))
    return replace(world, master_addr=address, master_known=True) if address else world
