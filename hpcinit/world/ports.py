"""Computes which ports a job may use for the rendezvous, torch's store and MASTER_PORT.

Every rank computes the same ports. They are outside of the range that the kernel assigns to outgoing connections.

If a firewall opens only some ports, the user sets `comm.ports`. The batch script exports this value as HPCINIT_PORTS,
and hpcinit then uses no other ports. gloo and NCCL still use ports from the kernel's range.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.base.errors import WorldError
from hpcinit.base.text import numbers
from hpcinit.world import World, number

ENV_PORTS = "HPCINIT_PORTS"
FROM_ENV = "env"  # use the user's MASTER_PORT, and MASTER_ADDR if it is set
NEEDED = 3  # a port each for the rendezvous, torch's store, and the program's MASTER_PORT
EXPECTED = f"a port, as in 29500, a range of {NEEDED} or more, as in 20000-20100, or {FROM_ENV}"

# Linux gives ports 32768-60999 to outgoing connections (net.ipv4.ip_local_port_range), so listening on one of them
# sometimes fails: https://github.com/NVIDIA/enroot/issues/243. Services use ports below 20000.
FIRST_PORT, LAST_PORT = 20_000, 32_767
PORT_COUNT = 8
# Some systems give 9000-65000 to outgoing connections. On these systems, rank 0 uses the following ports.
LOW_FIRST_PORT, LOW_LAST_PORT = 5_000, 8_999
LOW_PORT_COUNT = 3
EPHEMERAL, RESERVED = "ip_local_port_range", "ip_local_reserved_ports"
_SYSCTL = Path("/proc/sys/net/ipv4")  # these settings also apply to IPv6


def candidate_ports(job: str) -> tuple[int, ...]:
    """Return the ports that one attempt of a job may use.

    They are computed from a hash of the name. Ports computed from job ids would collide, because jobs with consecutive
    ids often share nodes.

    job: the name of the attempt: job, step and restart.
    """
    span, low_span = LAST_PORT - FIRST_PORT + 1, LOW_LAST_PORT - LOW_FIRST_PORT + 1
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    # A stride coprime to the spans (12768 = 2^5 x 3 x 7 x 19, and 4000 = 2^5 x 5^3) never repeats within them.
    usual = (FIRST_PORT + (start + i * 1009) % span for i in range(PORT_COUNT))
    return (*usual, *(LOW_FIRST_PORT + (start + i * 1009) % low_span for i in range(LOW_PORT_COUNT)))


def outside_ephemeral(candidates: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Return the ports, safe ones first. Also return a warning, or '' if at least two ports are safe.

    A port is unsafe if this node may assign it to an outgoing connection. Rank 0 needs two ports.
    """
    try:
        first, last = map(int, (_SYSCTL / EPHEMERAL).read_text().split())
        reserved = numbers((_SYSCTL / RESERVED).read_text())
    except (OSError, ValueError):  # not Linux, or hidden in a container
        return tuple(candidates), ""
    given = {port for port in candidates if first <= port <= last and port not in reserved}
    ordered = tuple(sorted(candidates, key=lambda port: port in given))
    if len(candidates) - len(given) >= 2:
        return ordered, ""
    return ordered, (
        f"{socket.gethostname()} gives ports {first}-{last} to outgoing connections (net.ipv4.{EPHEMERAL}). They "
        f"include {len(given)} of hpcinit's {len(candidates)} ports, so another program may be using these. The "
        f"administrator can reserve hpcinit's ports: sysctl net.ipv4.{RESERVED}={FIRST_PORT}-{LAST_PORT}"
    )


def problem(text: str) -> str:
    """Return why `text` is not a valid value of comm.ports, or '' if it is valid.

    The message does not contain the name of the key.
    """
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
            f"is {text!r} ({high - low + 1} ports), expected {NEEDED} or more: for the rendezvous, torch's store and "
            "MASTER_PORT"
        )
    return ""


def candidates(text: str, job: str) -> tuple[int, ...]:
    """Return the ports that one attempt of a job may use, according to comm.ports.

    A single port N becomes MASTER_PORT, and N + 1 and N + 2 are used, too.
    """
    first, dash, last = text.partition("-")
    low = int(first)
    if not dash:
        return low + 1, low, low + 2  # the rendezvous uses the first free port, and MASTER_PORT is the next one
    size = int(last) - low + 1
    start = int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big") % size
    return tuple(low + (start + i) % size for i in range(min(size, PORT_COUNT)))


def of_job(env: Mapping[str, str], job: str) -> tuple[int, ...]:
    """Return the ports that one attempt of a job may use, equal on every rank: the user's if set, or else hpcinit's.

    Raise WorldError if HPCINIT_PORTS is not valid.
    """
    text = env.get(ENV_PORTS, "")
    if not text:
        return candidate_ports(job)
    if reason := problem(text):
        raise WorldError(f"{ENV_PORTS} {reason} (comm.ports in the config sets it)")
    if text == FROM_ENV:
        text = str(number(env, "MASTER_PORT", f"{ENV_PORTS}={FROM_ENV} (comm.ports in the config) requires it"))
        if reason := problem(text):
            raise WorldError(f"MASTER_PORT {reason}")
    return candidates(text, job)


def fixed(env: Mapping[str, str], world: World) -> World:
    """Return `world` with the user's ports. If HPCINIT_PORTS=env, also use the user's MASTER_ADDR."""
    if not env.get(ENV_PORTS) or len(world.master_ports) == 1:  # a single port is already the user's or torchrun's
        return world
    address = env.get("MASTER_ADDR") if env[ENV_PORTS] == FROM_ENV else None
    world = replace(world, master_ports=of_job(env, world.job))
    return replace(world, master_addr=address, master_known=True) if address else world
