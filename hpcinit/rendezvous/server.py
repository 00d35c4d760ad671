"""Rank 0's side: opens the door, keeps the roll, says where the store is."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcinit.base import errors as kinds
from hpcinit.base import process_limits
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.rendezvous import fingerprint, protocol
from hpcinit.rendezvous.connections import Caller, Connections
from hpcinit.rendezvous.rendezvous_client import CONNECT_S, SAME_SECRET, SAME_VERSION, JoinRequest, Refused, connect
from hpcinit.rendezvous.roster import PHASES, Guest, RendezvousEndpoint, Roster
from hpcinit.rendezvous.start_failure import StartupFailure
from hpcinit.world import World, hosts

# Rank 0's ports: the first free candidate for the door, the next for a program's own rendezvous.

LISTEN = "0A"  # the state of a listener in /proc/net/tcp
FILES_BESIDES = 64  # Python's own, and rank 0's streams and sockets


def listen(address: str, candidates: tuple[int, ...], claim: JoinRequest) -> tuple[socket.socket, int]:
    """A listener, and the port for the program. Raises BringUpError; Refused if another process is rank 0 already.

    The last candidate is never the door's: a program's rendezvous must have a port too.
    """
    door, port, refused = _take(address, candidates)
    try:
        before = candidates.index(door.getsockname()[1]) if door else len(candidates)
        look_for_another(address, candidates[:before], claim)
        if door is None or port is None:
            raise _no_ports(address, door, refused)
    except BaseException:
        if door:
            door.close()
        raise
    return door, port


def _take(address: str, candidates: tuple[int, ...]) -> tuple[socket.socket | None, int | None, list[str]]:
    """The first free candidate as a listener, the next as a number, and why not the others."""
    door, refused = None, []
    for port in candidates:
        try:
            found = socket.create_server(
                (address, port), family=protocol.family(address), backlog=4096, reuse_port=False
            )
        except OSError as error:
            refused.append(f"{port}: {os.strerror(error.errno or 0)}")
            continue
        if door is None and port != candidates[-1]:
            door = found
            continue
        found.close()
        return door, port if door else None, refused
    return door, None, refused


def _no_ports(address: str, door: socket.socket | None, refused: list[str]) -> BringUpError:
    tried, here = "; ".join(refused), fingerprint.identity()
    if door is not None:
        return BringUpError(
            f"rank 0 found one free port at {address} and needs two, tried {tried}: end what listens there",
            quoted=tried,
        )
    return BringUpError(
        f"rank 0 (pid {here['pid']} on {here['host']}) cannot listen at {address}, tried ports {tried}: is {address} "
        "an address of this node, and are all these ports taken?",
        quoted=tried,
    )


def look_for_another(address: str, ports: Iterable[int], claim: JoinRequest) -> None:
    """Raises Refused, in the words of the other, if another rank 0 of this very start has its door at one of `ports`.

    A rank 0 refuses a second one. Who accepts it instead is none, and yet holds the key: raises Refused as well.
    Takes no longer than one stranger's silence in all.
    """
    until = time.monotonic() + CONNECT_S
    for port in ports:
        with contextlib.suppress(protocol.NotOurs):
            welcome = connect(address, port, claim, max(0.01, until - time.monotonic()))
            welcome.socket.close()
            here = fingerprint.identity()
            raise Refused(
                f"two processes act as rank 0 of this job: pid {here['pid']} on {here['host']}, and a process that "
                f"listens at {hosts.in_url(address, port)}{_owner(port)}, which accepted this one as if it were a rank "
                "of its own: no rank 0 does that. Another user may have found out the secret of this job: "
                f"{SAME_SECRET}"
            )


def _owner(port: int) -> str:
    """', started by user 1000' for who listens at `port` of this node; '' where the kernel does not show it."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for row in Path(table).read_text().splitlines()[1:]:
                words = row.split()  # sl local_address rem_address st ... uid
                if words[3] == LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    return f", started by user {words[7]}"
    return ""


def allow_many_files(ranks: int) -> None:
    """Raise the limit of open files, up to what the administrator allows. Raises BringUpError where that is not enough
    for a connection of each rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < ranks + FILES_BESIDES:
        raise BringUpError(
            f"rank 0 may have {hard} files open on {fingerprint.identity()['host']} (ulimit -Hn), and each of the "
            f"{ranks} ranks comes with two connections: raise the hard limit there to {2 * ranks + 1024} or more"
        )
    process_limits.raise_open_files_limit(ranks)


LATE_S = 15.0  # ranks that come so long after a failure are told of it: Slurm starts its tasks within seconds


class RendezvousServer(RendezvousEndpoint):
    """Listens on `address` in a thread of its own until everybody is up; the thread sleeps while nobody says anything.

    address: where the ranks reach rank 0. key: the secret of this submission. job: names this start.
    made_of: what this rank's fingerprint is. nat: the other nodes reach this one at a translated address.
    when_all: called once, in a thread of its own, when all ranks have connected.
    Raises BringUpError if no candidate port is free, Refused if another process has opened the door of this start
    already.
    """

    def __init__(
        self,
        world: World,
        address: str,
        key: str,
        job: str,
        made_of: Mapping[str, str],
        nat: bool = False,
        when_all: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._when_all = when_all
        self.clock_offset_s = self.clock_uncertainty_s = 0.0
        self.roll = Roster(world.world_size, world.hosts)
        self.roll.enter(Guest(0, **fingerprint.identity()))
        self._inside: dict[Caller, None] = {}  # the ranks that were let in; changed and walked under _changed
        self._told: dict[str, tuple[float, StartupFailure]] = {}  # by phase: when, and who was missing
        self._claim = JoinRequest(0, key, job, made_of, nat)
        self._reported: set[str] = set()  # what was printed once and is not to be printed again
        self._said_store = self._closing = self._waited_long = False
        allow_many_files(world.world_size)
        listener, self.program_port = listen(address, world.master_ports, self._claim)
        self.address = self.own_address = str(listener.getsockname()[0])
        self.port = int(listener.getsockname()[1])
        self._callers = Connections(listener, self._hear, self._unreadable, self._lose, world.world_size)
        try:
            # Another rank 0 has a later port if this one was taken at its time. We look only now that our own door
            # is open: two that begin at the same moment would each wait for the other.
            later = world.master_ports[world.master_ports.index(self.port) + 1 :]
            look_for_another(address, later, self._claim)
        except BaseException:
            self.close()
            raise

    def tell(self, phase: str) -> None:
        with self._changed:
            self.roll.move(self.roll.guests[0], phase)
            self._react()

    def offer_store(self, port: int) -> None:
        """Where torch's store listens; the ranks hear of it when all of them are ready for it."""
        with self._changed:
            self._store_port = port
            self._react()

    def missing(self, phase: str) -> str:
        with self._changed:
            missing = self.roll.missing(phase)
            if missing and len(self.roll.guests) == 1:
                missing += f"; nobody at all came to rank 0's door at {hosts.in_url(self.address, self.port)}"
            return missing

    def fail(self, error: str) -> None:
        with self._changed:
            self._on_failure = None
            guest = self.roll.guests[0]
            if not guest.reached("up") and not self._failure:
                guest.error, guest.gone = error[: protocol.LONGEST_ERROR], True
                self._fail(self._lost())

    def tell_the_late(self) -> None:
        deadline = time.monotonic() + LATE_S
        with self._changed:
            if not self._failure or self._waited_long or self._all_have_been_here():
                return
            say(f"up to {LATE_S:g} s for those who come now: {self.failure}")
            while not self._all_have_been_here() and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _all_have_been_here(self) -> bool:
        return self.roll.all_reached("started")

    def close(self) -> None:
        with self._changed:
            self._close()
        self._callers.join(2)

    def forget(self) -> None:
        for caller in self._inside:
            caller.socket.close()
        self._callers.forget()

    def _store_is_told(self) -> bool:
        return self._said_store

    def _still_waiting(self, phase: str) -> None:
        say(f"waiting: {self.missing(phase)}")

    def _too_late(self, phase: str) -> StartupFailure:
        with self._changed:
            self._waited_long = True
            self._fail(self._missing(phase))
            assert self._failure is not None
            return self._failure

    def _missing(self, phase: str) -> StartupFailure:
        rank, host = self.roll.first_missing(phase)
        return StartupFailure(self.missing(phase), kinds.START_UP, rank, host)

    def _lost(self) -> StartupFailure:
        """The first rank that died; false where none did."""
        first = next(iter(self.roll.dead()), None)
        where = (first.rank, first.host) if first else (None, "")
        return StartupFailure(self.roll.lost(), kinds.PEER_LOST, *where)

    # --- in the thread of the callers

    def _hear(self, caller: Caller, message: dict[str, Any]) -> None:
        with self._changed:
            self._take(caller, message)
            self._react()

    def _take(self, caller: Caller, message: dict[str, Any]) -> None:
        if caller.guest is not None:
            self._from_guest(caller, message)
        elif not caller.challenge:
            if message.get("hello") != protocol.GREETING or message.get("job") != self._claim.job:
                if str(message.get("hello")).startswith(protocol.PROTOCOL):
                    caller.send({"hello": protocol.GREETING})  # so that another version of hpcinit can say what it met
                raise protocol.NotOurs("another job")
            self._challenge(caller, message)
        else:
            rank, at = protocol.integer(message, "rank", 0, 2**31), protocol.endpoint(caller.where, self._claim.nat)
            proof = protocol.proof(self._claim.key, "guest", caller.challenge, f"{at}|{rank}")
            if not protocol.same(message.get("proof"), proof):
                raise protocol.NotOurs("no proof")
            pid, made_of = protocol.integer(message, "pid", 0, 2**31), message.get("made_of")
            guest = Guest(rank, protocol.text(message, "host", protocol.LONGEST_HOST), pid)
            self._register(caller, guest, made_of if isinstance(made_of, dict) else {})

    def _challenge(self, caller: Caller, message: dict[str, Any]) -> None:
        """Answer the greeting of a connection that is not authenticated yet."""
        key_id = protocol.key_id(self._claim.key, self._claim.job)
        if message.get("key_id") != key_id:
            self._report_once(
                "another secret",
                f"warning: a process at {caller.peer} asked for rank 0 of this job and holds another secret, so it "
                f"stays outside; if it is one of your ranks: {SAME_SECRET}",
            )
        at, caller.challenge = protocol.endpoint(caller.where, self._claim.nat), protocol.challenge()
        proof = protocol.proof(
            self._claim.key, "door", protocol.text(message, "challenge", 100), f"{at}|{self._claim.job}"
        )
        mine = {"proof": proof, "challenge": caller.challenge, "at": at, "key_id": key_id}
        caller.send({"hello": protocol.GREETING, **mine, **protocol.stamp(caller.heard)})

    def _from_guest(self, caller: Caller, message: dict[str, Any]) -> None:
        guest = caller.guest
        assert guest is not None
        try:
            if "phase" in message:
                self.roll.move(guest, protocol.choice(message, "phase", PHASES))
            if "who" in message:
                missing = self._recently_missing(protocol.choice(message, "who", PHASES))
                caller.send(missing.fields("missing"))
            if "error" in message:
                guest.error = protocol.text(message, "error", protocol.LONGEST_ERROR)
        except protocol.NotOurs as error:
            self._report_once(
                f"unread {guest.rank}",
                f"warning: rank {guest.rank} on {guest.host} sent a message that is not understood and is ignored: "
                f"{error}; {SAME_VERSION}",
            )
        if "error" in message and not guest.reached("up"):
            self._mourn(guest)
        caller.left |= "bye" in message

    def _report_once(self, topic: str, text: str) -> None:
        if topic not in self._reported:
            self._reported.add(topic)
            say(text)

    def _register(self, caller: Caller, guest: Guest, made_of: dict[str, Any]) -> None:
        before = self.roll.guests.get(guest.rank)
        if not 0 <= guest.rank < self.roll.world_size:
            refusal = f"rank {guest.rank} is not one of the {self.roll.world_size} ranks of this job"
        elif before and (guest.rank == 0 or not before.gone):
            refusal = (
                f"two processes claim rank {guest.rank}: pid {before.pid} on {before.host}, which came first, and pid "
                f"{guest.pid} on {guest.host}; is RANK or SLURM_PROCID left over in one of them?"
            )
        else:
            refusal = ""
        if refusal:
            say(f"refused: {refusal}")
            caller.send({"refused": refusal})
            raise protocol.NotOurs(refusal)
        caller.guest = guest
        self.roll.enter(guest)
        self._inside[caller] = None
        caller.send({"welcome": self.program_port, **protocol.stamp(caller.heard)})
        if self._failure:
            caller.send(self._failure.fields("failed"))
        if different := fingerprint.differences(self._claim.made_of, made_of):
            told = ", ".join(different)[: protocol.LONGEST_ERROR]
            text = f"rank {guest.rank} on {guest.host} is not made like rank 0: {told}"
            self._fail(StartupFailure(text, kinds.PROGRAM, guest.rank, guest.host))

    def _react(self) -> None:
        """What follows from what has changed; under the lock."""
        if not self._all_came and self.roll.all_reached("started"):
            self._all_came = True
            threading.Thread(target=self._when_all, name="hpcinit-all", daemon=True).start()
            self._send_all({"all": True})
            self._changed.notify_all()
        if not self._said_store and self._store_port is not None and self.roll.all_reached("imported"):
            self._said_store = True
            self._send_all({"store": self._store_port})
            self._changed.notify_all()
        if self.roll.all_reached("up"):
            self._close()

    def _close(self) -> None:
        """Say that the end of the connections is none of a rank; under the lock."""
        if not self._closing:
            self._closing = True
            self._send_all({"closed": True})
            self._callers.stop()

    def _unreadable(self, caller: Caller, error: Exception) -> None:
        """A connection sent what is no message; it is lost next."""
        if caller.guest is not None and isinstance(error, protocol.NotOurs):
            caller.guest.error = caller.guest.error or f"it sent something that is no message: {error}; {SAME_VERSION}"

    def _fail(self, reason: StartupFailure) -> None:
        if not self._failure:
            self._failure = reason
            self._send_all(reason.fields("failed"))
            self._changed.notify_all()
            if self._on_failure:
                self._on_failure(reason.message)

    def _lose(self, caller: Caller) -> None:
        with self._changed:
            caller.socket.close()
            guest = caller.guest
            if guest is None:
                return
            del self._inside[caller]
            if caller.left or guest.reached("up"):
                return
            self._mourn(guest)

    def _mourn(self, guest: Guest) -> None:
        guest.gone = True
        if not self._failure:  # else all others leave too, and who was first is told already
            self._fail(self._lost())

    def _recently_missing(self, phase: str) -> StartupFailure:
        """At the deadline every rank asks, and the answer takes a walk over all ranks: one walk a second is enough."""
        at, told = self._told.get(phase, (-math.inf, None))
        if told is None or time.monotonic() - at > 1:
            rank, host = self.roll.first_missing(phase)
            told = StartupFailure(self.roll.missing(phase), kinds.START_UP, rank, host)
            self._told[phase] = (time.monotonic(), told)
        return told

    def _send_all(self, message: dict[str, Any]) -> None:
        line = protocol.encode(message)
        for caller in self._inside:
            caller.send_line(line)
