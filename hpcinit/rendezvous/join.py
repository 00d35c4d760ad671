"""How a rank joins the others: first at rank 0's server, then at torch's store, which only they can find."""

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

from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.records import run_folder
from hpcinit.records.spec import Spec
from hpcinit.rendezvous import fingerprint, nonce, startup_events
from hpcinit.rendezvous.process_state import state
from hpcinit.rendezvous.rendezvous_client import ENV_NAT, Refused, RendezvousClient
from hpcinit.rendezvous.server import RendezvousServer
from hpcinit.slurm import slurm_client
from hpcinit.world import World, exports, hosts, network

Rendezvous = RendezvousServer | RendezvousClient
ENV_GLOO = "GLOO_SOCKET_IFNAME"


def join_rendezvous(world: World, spec: Spec | None, timeout: timedelta) -> Rendezvous | None:
    """Find the other ranks of this start; the rendezvous that is under way already, if there is one.

    hpcinit.run begins it, init goes on with it. After a shutdown a next one begins, with a number of its own, so that
    ranks of two generations never mix.

    None for a single rank, and under a torchrun of the user's, whose agents have met: those of
    launch=torchrun name the hosts and leave the rendezvous to the ranks. Raises BringUpError.
    """
    if world.world_size == 1 or (world.launcher == "torchrun" and not world.hosts):
        return None
    if state.rendezvous is not None:
        return state.rendezvous
    world = _with_candidate_ports(world)
    job = f"{world.job}#{state.rendezvous_count}"
    folder = Path(os.environ[run_folder.ENV_FOLDER]) if spec else None
    key, made_of = _key(world, spec), fingerprint.fingerprint(folder)
    notes: list[str] = []

    def resolve() -> list[str]:
        best, *others = addresses(world, spec)
        notes[:] = [best.note] if best.note else []
        return [best.address, *(other.address for other in others)]

    nat = os.environ.get(ENV_NAT, "") not in {"", "0"}
    if world.rank == 0:
        _publish(world)
        found: Rendezvous = _open_server(
            resolve(), lambda address: RendezvousServer(world, address, key, job, made_of, nat, nonce.remove)
        )
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
    """`world` with candidate ports where its one port is the user's own, which the program will want.

    Some launchers name no job (a PMI that is not Hydra's): without one, two of them on a node would share ports and
    key. What the ranks of one node share then is their parent.
    """
    job = world.job or (f"parent{os.getppid()}" if world.nodes == 1 else f"port{world.master_ports[0]}")
    if len(world.master_ports) == 1 or not world.job:
        return replace(world, job=job, master_ports=network.candidate_ports(job))
    return world


def _open_server(places: list[str], open_at: Callable[[str], RendezvousServer]) -> RendezvousServer:
    """At the first of rank 0's addresses that is one of this node."""
    problems: list[BringUpError] = []
    for place in places:
        try:
            return open_at(place)
        except Refused:
            raise  # another process is rank 0: no other address changes that
        except BringUpError as error:
            problems.append(error)
    raise BringUpError("\n".join(map(str, problems)), quoted="\n".join(one.quoted for one in problems))


def leave_rendezvous(error: str = "") -> None:
    """End this process's part in the rendezvous, telling the others why if it is because of an error."""
    if state.rendezvous is not None:
        rendezvous, state.rendezvous = state.rendezvous, None
        if error:
            rendezvous.fail(error)
            rendezvous.linger_after_failure()
        rendezvous.close()
        if isinstance(rendezvous, RendezvousServer):
            nonce.remove()


def barrier_and_close(world: World, timeout: timedelta) -> None:
    """End this process's part once all ranks have connected: a late rank must still find the server.

    For programs that do not call init: a command replaces this process, a short script ends before slower ranks
    have started. Raises BringUpError that names who did not come.
    """
    if state.rendezvous is not None:
        state.rendezvous.wait_for_all(time.monotonic() + timeout.total_seconds(), said_every_s(world))
    leave_rendezvous()


def program_environment(world: World, rendezvous: Rendezvous | None) -> dict[str, str]:
    """torch's `env://` variables, with a port that was free on rank 0's host a moment ago, and gloo's interface."""
    env = exports(world)
    if rendezvous is None:
        return env
    if len(world.master_ports) > 1:  # one alone is the user's own
        env["MASTER_PORT"] = str(rendezvous.program_port)
    if not world.master_known:
        env["MASTER_ADDR"] = rendezvous.address  # where rank 0 was found
    return env | _interface_for_gloo(world, rendezvous)


def _interface_for_gloo(world: World, rendezvous: Rendezvous) -> dict[str, str]:
    """The interface that reaches rank 0, where gloo would take an address that other nodes cannot reach."""
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
    """What only the ranks of this job know; without a secret, what at least tells jobs and restarts apart."""
    return hashlib.sha256(f"{nonce.find(world, spec)}|{world.job}".encode()).hexdigest()


def addresses(world: World, spec: Spec | None) -> list[hosts.Found]:
    """Where rank 0 is, as this node sees it: the likeliest first. Raises WorldError with what to mend."""
    host, template = _published(world) or world.master_addr, spec.comm.host_template if spec else ""
    try:
        best = hosts.find(host, world.nodes, node_addr=_node_addr, template=template)
    except WorldError as error:
        own = _towards_the_others(world) if world.node_rank == 0 else ""  # its other ranks see the same /etc/hosts
        if not own:
            raise
        note = f"{error}; until then rank 0 listens at {own}, which reaches the other nodes"
        best = hosts.Found(own, note if world.rank == 0 else "")
    # A name with several addresses may list them in another order on another node.
    others = [text for text in _all_of(hosts.rename(host, template)) or _all_of(host) if text != best.address]
    return [best, *(hosts.Found(text) for text in others if not ipaddress.ip_address(text.split("%")[0]).is_loopback)]


def _all_of(name: str) -> Sequence[str]:
    try:
        return hosts.resolve(name)
    except OSError:
        return ()


NODE_ADDRESS_LIMIT = timedelta(seconds=20)  # the other ranks wait meanwhile


@functools.cache
def _node_addr(host: str) -> str | None:
    """What Slurm calls the node's address, for names that do not resolve; None where nobody says."""
    if alias := hosts.node_aliases(os.environ.get("SLURM_NODE_ALIASES", "")).get(host):
        return alias
    try:
        done = slurm_client.run(["scontrol", "--all", "show", "node", host], at_most=NODE_ADDRESS_LIMIT)
    except slurm_client.Unreachable:
        return None  # containers often have no scontrol
    return next((word.partition("=")[2] for word in done.stdout.split() if word.startswith("NodeAddr=")), None)


def _towards_the_others(world: World) -> str:
    """This node's address on the way to another node of the world; '' where none can be found."""
    for host in world.hosts:
        if host != world.host:
            try:
                return network.towards(hosts.find(host, world.nodes).address)
            except WorldError:
                continue
    return ""


def _publication(world: World) -> Path | None:
    folder = os.environ.get(run_folder.ENV_FOLDER)
    return Path(folder) / f"rank-0-of-{world.job}.txt" if folder else None


def _publish(world: World) -> None:
    """Rank 0 writes where it is, for ranks that cannot compute it (--distribution=arbitrary without its file).

    The file also shows a second process that claims rank 0 on another node, where it would listen too.
    Raises BringUpError that names both.
    """
    path, me = _publication(world), fingerprint.identity()
    if path is None or world.nodes == 1:
        return
    try:
        with path.open("x") as file:
            file.write(f"{world.master_addr}\n{me['host']}\n{me['pid']}\n")
    except FileExistsError:
        written = ""
        with contextlib.suppress(OSError):  # a file server's trouble: the check is lost, not the start
            written = path.read_text()
        _, host, pid, *_ = [*written.split("\n"), "", "", ""]
        if host and host != me["host"]:
            raise BringUpError(
                f"two processes claim rank 0: pid {pid} on {host}, which came first (so says {path}), and pid "
                f"{me['pid']} on {me['host']}; is RANK or SLURM_PROCID left over in one of them?"
            ) from None
    except OSError:
        if not world.master_known:
            raise


def _published(world: World) -> str:
    """What rank 0 has published, or ''."""
    path = _publication(world)
    try:
        return path.read_text().partition("\n")[0] if path is not None else ""
    except OSError:
        return ""


def said_every_s(world: World) -> float:
    """torch's own cadence for barriers over a store: 10 s, and a second more per thousand ranks."""
    return 10 + world.world_size / 1000
