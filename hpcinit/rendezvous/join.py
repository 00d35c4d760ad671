"""How a rank joins the others: first rank 0's server, then torch's store, whose port only the ranks learn."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.records import run_folder
from hpcinit.records.spec import Spec
from hpcinit.rendezvous import nonce, protocol, startup_events
from hpcinit.rendezvous.process_state import state
from hpcinit.rendezvous.rendezvous_client import ENV_NAT, Refused, RendezvousClient, RendezvousEndpoint
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.slurm import slurm_client
from hpcinit.world import World, exports, network, ports

ENV_GLOO = "GLOO_SOCKET_IFNAME"


def join_rendezvous(world: World, spec: Spec | None, timeout: timedelta) -> RendezvousEndpoint | None:
    """Find the other ranks of this start, and return the rendezvous. Return the current one if there is one.

    hpcinit.run creates it and init() continues with it. After shutdown() the next one gets a new number, so that ranks
    of two generations never mix.

    Return None for a single rank, and under a torchrun that the user started, which has its own rendezvous. With
    launch=torchrun the agents know the hosts, and the ranks use this rendezvous. Raise BringUpError.
    """
    if world.world_size == 1 or (world.launcher == "torchrun" and not world.hosts):
        return None
    if state.rendezvous is not None:
        return state.rendezvous
    world = _with_candidate_ports(world)
    job = f"{world.job}#{state.rendezvous_count}"
    folder = Path(os.environ[run_folder.ENV_FOLDER]) if spec else None
    key, made_of = _key(world, spec), protocol.fingerprint(folder)
    notes: list[str] = []

    def resolve() -> list[str]:
        """Return rank 0's addresses, the likeliest first. notes: what to print about the likeliest one."""
        best, *others = addresses(world, spec)
        notes[:] = [best.note] if best.note else []
        return [best.address, *(other.address for other in others)]

    nat = os.environ.get(ENV_NAT, "") not in {"", "0"}
    if world.rank == 0:
        _check_master_addr(world)
        _publish_host(world)
        found: RendezvousEndpoint = _open_server(
            resolve(), lambda address: RendezvousServer(world, address, key, job, made_of, nat)
        )
        _publish_address(world, found.address)
    else:
        deadline = time.monotonic() + timeout.total_seconds()
        found = RendezvousClient(world, resolve, key, job, made_of, deadline, nat)
    state.rendezvous = found
    clock = (found.clock_offset_s, found.clock_uncertainty_s)
    startup_events.record_event("met", **({} if None in clock else {"clock": clock}))
    for note in notes:
        say(note)
    state.rendezvous_count += 1
    return found


def _with_candidate_ports(world: World) -> World:
    """Return `world` with candidate ports if it has only the user's port, which the program itself will use.

    Some launchers give the job no name (PMI without Hydra). Without one, two jobs on a node would share ports and key.
    The ranks of one node then use their parent's process id as the name.
    """
    job = world.job or (f"parent{os.getppid()}" if world.nodes == 1 else f"port{world.master_ports[0]}")
    if len(world.master_ports) == 1 or not world.job:
        return replace(world, job=job, master_ports=ports.of_job(os.environ, job))
    return world


def _check_master_addr(world: World) -> None:
    """Raise BringUpError if the user's own MASTER_ADDR, used because of comm.ports=env, is not of rank 0's node."""
    if os.environ.get(ports.ENV_PORTS) != ports.FROM_ENV or not os.environ.get("MASTER_ADDR"):
        return
    name = world.master_addr
    found = _resolve_or_nothing(name)
    if network.first_of_ours(found):
        return
    where = f"resolves to {', '.join(found)}" if found else "does not resolve"
    raise BringUpError(
        f"MASTER_ADDR is {name}, which {where}: not an address of {socket.gethostname()}, where rank 0 runs. Set it to "
        f"{world.host or socket.gethostname()} or another address of that node, or unset it: hpcinit finds rank 0 "
        f"without it (comm.ports={ports.FROM_ENV} requests your own MASTER_ADDR and MASTER_PORT)"
    )


def _open_server(places: list[str], open_at: Callable[[str], RendezvousServer]) -> RendezvousServer:
    """Open the server at the first of rank 0's addresses that belongs to this node."""
    problems: list[BringUpError] = []
    for place in places:
        try:
            return open_at(place)
        except Refused:
            raise  # another process is rank 0, at whichever address
        except BringUpError as error:
            problems.append(error)
    raise BringUpError("\n".join(map(str, problems)), quoted="\n".join(one.quoted for one in problems))


def leave_rendezvous(error: str = "") -> None:
    """End this process's part in the rendezvous. `error` is reported to the other ranks."""
    if state.rendezvous is not None:
        rendezvous, state.rendezvous = state.rendezvous, None
        if error:
            rendezvous.fail(error)
            rendezvous.linger_after_failure()
        rendezvous.close()
        if isinstance(rendezvous, RendezvousServer):
            nonce.remove()


def barrier_and_close(world: World, timeout: timedelta) -> None:
    """Wait until all ranks have connected, then end this process's part: a late rank must still find the server.

    For programs that do not call init(): a command replaces this process, and a short script ends before slower ranks
    have started. Raise BringUpError that names the ranks that did not connect.
    """
    if state.rendezvous is not None:
        state.rendezvous.wait_for_all(time.monotonic() + timeout.total_seconds(), report_interval_s(world))
    leave_rendezvous()


def program_environment(world: World, rendezvous: RendezvousEndpoint | None) -> dict[str, str]:
    """Return torch's `env://` variables, with a port that was free on rank 0's host, and gloo's interface."""
    env = exports(world)
    if rendezvous is None:
        return env
    if len(world.master_ports) > 1:  # a single port was set by the user
        env["MASTER_PORT"] = str(rendezvous.program_port)
    if not world.master_known:
        env["MASTER_ADDR"] = rendezvous.address  # where rank 0 was found
    return env | _interface_for_gloo(world, rendezvous)


def _interface_for_gloo(world: World, rendezvous: RendezvousEndpoint) -> dict[str, str]:
    """Return the interface that reaches rank 0 if gloo would choose an address that other nodes cannot reach."""
    if world.nodes == 1 or ENV_GLOO in os.environ:
        return {}
    reason = network.blind_spot(socket.gethostname())
    name = network.holding(rendezvous.own_address) if reason else ""
    if not name or ipaddress.ip_address(rendezvous.own_address).is_loopback:
        return {}
    if world.local_rank == 0:
        say(f"{reason}, where no other node reaches it: {ENV_GLOO} is set to {name}, the interface that reaches rank 0")
    return {ENV_GLOO: name}


def _key(world: World, spec: Spec | None) -> str:
    """Return the key that only the ranks of this start have. Without a secret it still differs per job and restart."""
    return hashlib.sha256(f"{nonce.find(world, spec)}|{world.job}".encode()).hexdigest()


def addresses(world: World, spec: Spec | None) -> list[network.Found]:
    """Return rank 0's addresses as this node sees them, the likeliest first. Raise WorldError with what to fix."""
    published, listening = _read_published(world)
    host, template = published or world.master_addr, spec.comm.host_template if spec else ""
    try:
        best = network.find_address(host, world.nodes, node_addr=_slurm_address, template=template)
    except WorldError as error:
        own = _address_towards_others(world) if world.node_rank == 0 else ""  # its other ranks see the same /etc/hosts
        reaches = "which reaches the other nodes"
        if not own and world.rank == 0 and _rank_0_file(world):
            own, reaches = network.default_address(), "and the other ranks read that address from the run folder"
        if not (own or listening):
            raise
        note = f"{error}; until that is fixed rank 0 listens at {own}, {reaches}"
        best = network.Found(listening or own, note if world.rank == 0 else "")
    # Another node may list the addresses of the same name in another order.
    others = [
        text
        for text in _resolve_or_nothing(network.rename_host(host, template)) or _resolve_or_nothing(host)
        if text != best.address
    ]
    return [best, *(network.Found(text) for text in others if not ipaddress.ip_address(text.split("%")[0]).is_loopback)]


def _resolve_or_nothing(name: str) -> Sequence[str]:
    """Return the addresses of `name`, none if it does not resolve."""
    try:
        return network.resolve(name)
    except OSError:
        return ()


NODE_ADDRESS_LIMIT = timedelta(seconds=20)  # the other ranks wait meanwhile


@functools.cache
def _slurm_address(host: str) -> str | None:
    """Return Slurm's address of the node, for names that do not resolve, or None if Slurm has none."""
    if alias := network.node_aliases(os.environ.get("SLURM_NODE_ALIASES", "")).get(host):
        return alias
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
    """Return the file in which rank 0 publishes its host and address; None without a run folder."""
    folder = os.environ.get(run_folder.ENV_FOLDER)
    return Path(folder) / f"rank-0-of-{world.job}.txt" if folder else None


def _publish_host(world: World) -> None:
    """Write rank 0's host to a file, for ranks that cannot compute it (--distribution=arbitrary without its file).

    The file also reveals a second process that claims rank 0 on another node, where it would listen too.
    Raise BringUpError that names both.
    """
    path, me = _rank_0_file(world), protocol.identity()
    if path is None or world.nodes == 1:
        return
    try:
        with path.open("x") as file:
            file.write(f"{world.master_addr}\n{me['host']}\n{me['pid']}\n")
    except FileExistsError:
        written = ""
        with contextlib.suppress(OSError):  # if the file server fails, only this check is lost
            written = path.read_text()
        _, host, pid, *_ = [*written.split("\n"), "", "", ""]
        if host and host != me["host"]:
            raise BringUpError(
                f"two processes claim rank 0: pid {pid} on {host}, which was first (see {path}), and pid "
                f"{me['pid']} on {me['host']}; unset RANK and SLURM_PROCID if they are left from an earlier job"
            ) from None
    except OSError:
        if not world.master_known:
            raise


def _publish_address(world: World, address: str) -> None:
    """Add the address where rank 0 listens to its file, for nodes that cannot resolve its name."""
    path, me = _rank_0_file(world), protocol.identity()
    if path is not None and world.nodes > 1:
        with contextlib.suppress(OSError):  # only nodes without names need it
            text = f"{world.master_addr}\n{me['host']}\n{me['pid']}\n{address}\n"
            safe_files.write_atomically(path, text, 0o600)


def _read_published(world: World) -> tuple[str, str]:
    """Return the host that rank 0 has published, and the address where it listens, each '' if it has not."""
    path = _rank_0_file(world)
    try:
        host, _, _, address, *_ = [*(path.read_text().split("\n") if path is not None else []), *[""] * 4]
    except OSError:
        return "", ""
    return host, address


def report_interval_s(world: World) -> float:
    """Return the seconds between two messages about missing ranks: like torch, 10 and one more per thousand ranks."""
    return 10 + world.world_size / 1000
