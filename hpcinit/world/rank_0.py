"""Finds rank 0: its host, and the addresses at which this node can reach it.

If other ranks cannot compute the host or the addresses, rank 0 publishes them in the run folder.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.records import run_folder
from hpcinit.slurm import slurm_client
from hpcinit.world import World, network, ports


def addresses(world: World, template: str) -> list[network.Found]:
    """Return the addresses at which this node may be able to reach rank 0, likeliest first.

    If there is none, raise a WorldError that shows what to fix.

    template: comm.host_template, or ''.
    """
    published, listening = _read_published(world)
    host = published or world.master_addr
    try:
        best = network.find_address(host, world.nodes, node_addr=_slurm_address, template=template)
    except WorldError as error:
        own = _address_towards_others(world) if world.node_rank == 0 else ""  # these ranks share an /etc/hosts
        reaches = "from which this node connects to the other nodes"
        if not own and world.rank == 0 and _rank_0_file(world):
            own, reaches = network.default_address(), "and the other ranks read that address from the run folder"
        if not (own or listening):
            raise
        note = f"{error}; for now, rank 0 listens at {own}, {reaches}"
        best = network.Found(listening or own, note if world.rank == 0 else "")
    # Another node may list the addresses of the same name in another order.
    others = [
        text
        for text in _resolve_or_nothing(network.rename_host(host, template)) or _resolve_or_nothing(host)
        if text != best.address
    ]
    return [best, *(network.Found(text) for text in others if not ipaddress.ip_address(text.split("%")[0]).is_loopback)]


def _resolve_or_nothing(name: str) -> Sequence[str]:
    try:
        return network.resolve(name)
    except OSError:
        return ()


NODE_ADDRESS_LIMIT = timedelta(seconds=20)  # short, because the other ranks wait meanwhile


@functools.cache
def _slurm_address(host: str) -> str | None:
    """Return the address that Slurm has for a node, or None. It is needed if the node's name does not resolve."""
    try:
        done = slurm_client.run(["scontrol", "--all", "show", "node", host], at_most=NODE_ADDRESS_LIMIT)
    except slurm_client.Unreachable:
        return None  # containers often have no scontrol
    return next((word.partition("=")[2] for word in done.stdout.split() if word.startswith("NodeAddr=")), None)


def _address_towards_others(world: World) -> str:
    """Return this node's address on the route to another node of the world, or '' if none is found."""
    for host in world.hosts:
        if host != world.host:
            try:
                return network.towards(network.find_address(host, world.nodes).address)
            except WorldError:
                continue
    return ""


def _rank_0_file(world: World) -> Path | None:
    """Return the file in which rank 0 publishes its host and address, or None without a run folder."""
    folder = os.environ.get(run_folder.ENV_FOLDER)
    return Path(folder) / f"rank-0-of-{world.job}.txt" if folder else None


def publish(world: World, me: Mapping[str, Any], address: str = "") -> None:
    """Write rank 0's host into the run folder, for ranks that cannot compute it (srun --distribution=arbitrary).

    With `address`, also write the address at which rank 0 listens, for nodes that cannot resolve the host's name. Raise
    BringUpError if a process on another node has already claimed rank 0.

    me: the host and the process id of rank 0.
    """
    path = _rank_0_file(world)
    if path is None or world.nodes == 1:
        return
    text = f"{world.master_addr}\n{me['host']}\n{me['pid']}\n{address}\n"
    try:
        if address:
            safe_files.write_atomically(path, text, 0o600)
            return
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        written = ""
        with contextlib.suppress(OSError):  # if the file server fails, skip this check
            written = path.read_text()
        _, host, pid, *_ = [*written.split("\n"), "", "", ""]
        if host and host != me["host"]:
            raise BringUpError(
                f"two processes claim rank 0: pid {pid} on {host}, which was first (see {path}), and pid {me['pid']} "
                f"on {me['host']}; unset RANK and SLURM_PROCID if they are left from an earlier job"
            ) from None
    except OSError:
        if not (address or world.master_known):
            raise


def _read_published(world: World) -> tuple[str, str]:
    """Return the host and the address that rank 0 has published. Each is '' if rank 0 has not published it."""
    path = _rank_0_file(world)
    try:
        host, _, _, address, *_ = [*(path.read_text().split("\n") if path is not None else []), *[""] * 4]
    except OSError:
        return "", ""
    return host, address


def check_master_addr(world: World) -> None:
    """Raise BringUpError if the user's MASTER_ADDR (comm.ports=env) is not an address of rank 0's node."""
    if os.environ.get(ports.ENV_PORTS) != ports.FROM_ENV or not os.environ.get("MASTER_ADDR"):
        return
    name = world.master_addr
    found = _resolve_or_nothing(name)
    if network.first_of_ours(found):
        return
    where = f"resolves to {', '.join(found)}" if found else "does not resolve"
    raise BringUpError(
        f"MASTER_ADDR is {name}, which {where}, expected an address of {socket.gethostname()}, where rank 0 runs. Set "
        f"MASTER_ADDR to {world.host or socket.gethostname()}, or unset it, so that hpcinit finds rank 0. With "
        f"comm.ports={ports.FROM_ENV}, hpcinit uses your MASTER_ADDR and MASTER_PORT"
    )
