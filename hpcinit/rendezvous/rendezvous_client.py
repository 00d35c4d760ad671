"""The rendezvous on every rank except rank 0: tries the candidate ports until it finds rank 0 of the same job.

RendezvousEndpoint contains what all ranks do: wait for the other ranks, and receive failures.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from hpcinit.base import failure_kinds
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError, WorldError
from hpcinit.rendezvous import protocol
from hpcinit.rendezvous.protocol import StartupFailure
from hpcinit.world import World

# The client's half of the handshake: it checks that the server is rank 0 of its job, and that rank 0 accepts it.

CONNECT_S = 3.0  # if a server does not prove itself within this time, it counts as another program


class Refused(BringUpError):
    """Rank 0 of this job refused this process."""


class Silent(protocol.NotOurs):
    """A process accepted the connection but sent nothing in time. It may be another program, or a busy rank 0."""


@dataclass(frozen=True)
class JoinRequest:
    """What a process sends to rank 0 to join.

    key: the secret of this submission. It is used for the proof and never sent itself.
    job: the name of this attempt.
    made_of: the fingerprint of the process's environment, such as its torch version.
    ranks_here: all ranks on this node, see World.
    """

    rank: int
    key: str
    job: str
    made_of: Mapping[str, str]
    ranks_here: Sequence[int] = ()


class JoinReply(NamedTuple):
    """A connection that rank 0 has accepted.

    program_port: the port that the program can use for its own rendezvous.
    rest: other messages from rank 0 that have already arrived.
    offset: how many seconds rank 0's clock is ahead of this node's.
    """

    socket: socket.socket
    lines: protocol.Lines
    program_port: int
    rest: list[dict[str, Any]]
    offset: protocol.ClockOffset


def connect(
    address: str, port: int, request: JoinRequest, patience_s: float = CONNECT_S, deadline: float = 0.0
) -> JoinReply:
    """Connect to rank 0 and prove that this process belongs to the job. Return the accepted connection.

    Raise Refused if rank 0 refuses this process. Raise NotOurs, with what was found instead, if rank 0 of this job is
    not at this address and port.

    patience_s: how many seconds to wait for rank 0's proof.
    deadline: until when to wait for rank 0's last reply, in seconds of time.monotonic(). A rank that disconnects before
        this reply counts as dead, so give a busy rank 0 enough time.
    """
    until = time.monotonic() + patience_s
    try:
        connection = socket.create_connection((address, port), patience_s)
    except OSError as error:
        raise protocol.NotOurs((error.strerror or str(error)).lower()) from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _shake_hands(connection, request, until, max(until, deadline))
    except BaseException as error:
        connection.close()
        if isinstance(error, TimeoutError):
            raise Silent("a process listens there but sends nothing") from None
        if isinstance(error, (OSError, EOFError)):
            raise protocol.NotOurs("another program's server") from None
        raise


def _shake_hands(connection: socket.socket, request: JoinRequest, until: float, deadline: float) -> JoinReply:
    """Do the handshake with rank 0, and return the accepted connection. The key itself is never sent."""
    mine, lines, offset = protocol.challenge(), protocol.Lines(), protocol.ClockOffset()
    own_id = protocol.key_id(request.key, request.job)
    sent = time.time()
    hello = {"hello": protocol.GREETING, "job": request.job, "challenge": mine, "key_id": own_id}
    connection.sendall(protocol.encode(hello))
    (answer,) = protocol.receive(connection, lines, until)[:1]
    read = time.time()
    _check_proof(answer, request, mine)  # before using anything else in the answer
    offset.learn(sent, answer.get("clock"), read)
    vouched = protocol.proof(request.key, "peer", protocol.text(answer, "challenge"), str(request.rank))
    hand = {"rank": request.rank, "proof": vouched, "made_of": dict(request.made_of), **protocol.identity()}
    hand["here"] = list(request.ranks_here)
    sent = time.time()
    connection.sendall(protocol.encode(hand))
    first, *rest = protocol.receive(connection, lines, deadline)
    offset.learn(sent, first.get("clock"), time.time())
    if "refused" in first:
        raise Refused(protocol.text(first, "refused"))
    return JoinReply(connection, lines, protocol.port(first, "reply"), rest, offset)


def _check_proof(answer: dict[str, Any], request: JoinRequest, challenge: str) -> None:
    """Raise NotOurs unless `answer` proves that the other process has our key."""
    if protocol.same(answer.get("proof"), protocol.proof(request.key, "server", challenge, request.job)):
        return
    key_id, hello = answer.get("key_id"), answer.get("hello")
    if isinstance(hello, str) and hello.startswith(protocol.PROTOCOL) and "proof" not in answer:
        raise protocol.NotOurs("rank 0 of another job, another attempt or another version of hpcinit")
    if isinstance(key_id, str) and key_id != protocol.key_id(request.key, request.job):
        raise protocol.NotOurs(f"a process of this job with another secret: {protocol.SAME_SECRET}")
    raise protocol.NotOurs("another program's server")


# The pause between two rounds of attempts grows. It is short at first, because rank 0 may start a little later than the
# other ranks. It grows, because thousands of ranks must not keep connecting at this rate for minutes.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 1.0
CONNECTING_RANKS = 4096  # with more ranks, pauses grow, to limit the attempts per second
# Linux keeps at most this many connections that wait to be accepted (net.core.somaxconn), and drops further ones. The
# kernel retries a dropped connection after 1, 3, 7 and 15 s. So in a larger job, the ranks spread their attempts over
# the time that rank 0 needs to accept them (docs/development/measurements.md).
QUEUE, EACH_S = 4096, 0.00025
LONGEST_SILENCE_S = 60.0  # the longest wait for a server that sends nothing


def spread_s(world_size: int) -> float:
    """Return how many seconds this rank should wait before it connects to rank 0.

    In a large job the time is random, so that not all ranks connect at the same moment.
    """
    return random.uniform(0, world_size * EACH_S) if world_size > QUEUE else 0.0


class Stage(IntEnum):
    """How far the start-up of all ranks has progressed. Each rank has its own copy, which only moves forward.

    When all ranks have reached a phase, rank 0 moves to the next stage and sends a message. The other ranks move when
    they receive it.
    """

    GATHERING = 0  # ranks connect
    CONNECTED = 1  # all ranks have connected: the message 'all'
    STORE = 2  # all ranks are in init, and torch's store has a port: 'store'
    OVER = 3  # all ranks are up, or rank 0 has left on purpose: 'closed'
    FAILED = 4  # a rank died, differs or is missing: 'failed'


class RendezvousEndpoint(ABC):
    """This process's end of the rendezvous. There is a subclass for rank 0, and one for the other ranks.

    address: where rank 0 was found.
    own_address: this node's address, as rank 0 sees it.
    program_port: the port that the program can use for its own rendezvous.
    failure: why the start-up failed, or ''.
    clock_offset_s: how many seconds rank 0's clock is ahead of this node's, or None if not measured.
    clock_uncertainty_s: the maximum error of clock_offset_s.
    """

    address = ""
    own_address = ""
    program_port = 0
    clock_offset_s: float | None = None
    clock_uncertainty_s: float | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self._stage = Stage.GATHERING
        self._failure: StartupFailure | None = None  # set in Stage.FAILED
        self._store_port: int | None = None  # set from Stage.STORE on, on rank 0 earlier
        self._act_on_failure: Callable[[str], None] | None = None
        self._changed = threading.Condition()  # guards all of these

    @property
    def failure(self) -> str:
        return self._failure.message if self._failure else ""

    @abstractmethod
    def report_phase(self, phase: str) -> None:
        """Report to rank 0 that this rank has reached a phase, one of PHASES."""

    @abstractmethod
    def missing(self, phase: str) -> str:
        """Return a message that names the ranks that have not reached `phase`, or '' if this rank can't find out."""

    @abstractmethod
    def fail(self, error: str) -> None:
        """Report to all other ranks that this rank failed, and why."""

    def linger_after_failure(self) -> None:  # noqa: B027 - only rank 0 does something
        """Wait briefly after fail(), so that ranks that connect late also receive the error."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect on purpose, so that this rank is not reported as dead."""

    @abstractmethod
    def forget(self) -> None:
        """In a forked child, close the child's copies of the sockets. The parent keeps its own."""

    def wait_for_all(self, deadline: float, every_s: float) -> None:
        """Wait until all ranks have connected. If they don't, raise a BringUpError that names the missing ranks.

        deadline: when to give up, in seconds of time.monotonic().
        every_s: how often rank 0 prints which ranks are missing, in seconds.
        """
        self._wait(Stage.CONNECTED, "started", deadline, every_s)

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        """Wait until all ranks have reached init(), and return the port of torch's store.

        If they don't, raise a BringUpError that names the missing ranks.

        deadline: when to give up, in seconds of time.monotonic().
        every_s: how often rank 0 prints which ranks are missing, in seconds.
        """
        self._wait(Stage.STORE, "imported", deadline, every_s)
        if self._store_port is None:
            raise BringUpError(
                f"rank 0 on {self._world.master_addr} stopped before rank {self._world.rank} finished hpcinit.init(). "
                "Read the log of rank 0; every rank must call hpcinit.init()"
            )
        return self._store_port

    def on_failure(self, act: Callable[[str], None] | None) -> None:
        """Call `act` with the error when a rank fails, or at once if one has already failed.

        act: a function, which replaces the function of an earlier call. None: only remove the earlier function.
        """
        with self._changed:
            self._act_on_failure = act
            failure = self._failure
        if act and failure:
            act(failure.message)

    def _advance(self, stage: Stage) -> bool:
        """Advance to `stage` and wake up waiting threads. Return False if this start-up had already reached `stage`."""
        with self._changed:
            if stage <= self._stage:
                return False
            self._stage = stage
            self._changed.notify_all()
            return True

    def _fail(self, reason: StartupFailure) -> None:
        """Record the failure and call on_failure()'s callback, unless the start-up is over or has already failed."""
        with self._changed:
            if self._stage >= Stage.OVER:
                return
            self._failure = reason
            self._advance(Stage.FAILED)
            act = self._act_on_failure
        if act:
            act(reason.message)

    def _wait(self, stage: Stage, phase: str, deadline: float, every_s: float) -> None:
        """Wait until the start-up reaches `stage`. Raise BringUpError if the start-up fails, or at the deadline.

        phase: the phase that all ranks must reach for this stage. Messages name the ranks that have not reached it.
        """
        reported_at = time.monotonic()
        with self._changed:
            while self._stage < stage and (now := time.monotonic()) <= deadline:
                if now - reported_at > every_s:
                    reported_at = now
                    self._still_waiting(phase, deadline - now)
                self._changed.wait(max(0.05, min(every_s, deadline - now)))
            if stage <= self._stage <= Stage.OVER:
                return
        raise (self._failure or self._too_late(phase)).error()

    def _still_waiting(self, phase: str, left_s: float) -> None:  # noqa: B027 - only rank 0 does something
        """Report the missing ranks.

        left_s: how many seconds remain until the deadline.
        """

    @abstractmethod
    def _too_late(self, phase: str) -> StartupFailure:
        """Return the failure to raise at the deadline. On rank 0, also report it to the connected ranks."""


class RendezvousClient(RendezvousEndpoint):
    """The connection of a rank to rank 0, from the first attempt to connect until all ranks are up.

    If rank 0 is not found before the deadline, raise BringUpError with what was seen at each port.

    resolve: a function that returns the addresses to try. It is called in each round, because a name may not resolve at
        first. If there are no addresses, it raises WorldError with the reason.
    deadline: when to give up, in seconds of time.monotonic().
    """

    def __init__(
        self,
        world: World,
        resolve: Callable[[], list[str]],
        key: str,
        job: str,
        made_of: Mapping[str, str],
        deadline: float,
    ) -> None:
        super().__init__(world)
        self._request = JoinRequest(world.rank, key, job, made_of, world.ranks_here)
        self._warned = False
        self._missing: StartupFailure | None = None
        self._socket, self._lines, self.program_port, messages, offset = self._connect_to_rank_0(resolve, deadline)
        if offset.known:
            self.clock_offset_s, self.clock_uncertainty_s = offset.known
        self.address = str(self._socket.getpeername()[0])
        self.own_address = str(self._socket.getsockname()[0])
        for message in messages:
            self._handle(message)
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._receive_messages, name="hpcinit-rendezvous", daemon=True)
        self._thread.start()

    def _connect_to_rank_0(self, resolve: Callable[[], list[str]], deadline: float) -> JoinReply:
        """Try all addresses and ports, with growing pauses, until rank 0 accepts this rank.

        Raise BringUpError if that does not happen before the deadline.
        """
        seen: dict[str, str] = {}
        listen_s: dict[str, float] = {}
        pause, longest_pause = FIRST_PAUSE_S, LAST_PAUSE_S * max(1.0, self._world.world_size / CONNECTING_RANKS)
        time.sleep(spread_s(self._world.world_size))
        while True:
            try:
                for address in resolve():
                    for port in self._world.master_ports:
                        where = f"{address}:{port}"
                        silence_s = listen_s.get(where, CONNECT_S)
                        patience = max(0.1, min(silence_s, deadline - time.monotonic()))
                        try:
                            return connect(address, port, self._request, patience, deadline)
                        except protocol.NotOurs as error:
                            seen[where] = str(error)
                            # Next time, wait longer: it may be our rank 0 with a long queue, and a new connection is at
                            # the end of that queue.
                            if isinstance(error, Silent):
                                listen_s[where] = min(LONGEST_SILENCE_S, 2 * silence_s)
            except WorldError as error:
                seen[self._world.master_addr] = str(error)
            if time.monotonic() > deadline:
                raise BringUpError(self._not_found(seen), rank_at_fault=0, host_at_fault=self._world.master_addr)
            time.sleep(pause * random.uniform(0.5, 1.5))  # thousands of ranks must not connect at the same moment
            pause = min(longest_pause, pause * 1.5)

    def report_phase(self, phase: str) -> None:
        self._send({"phase": phase})

    def missing(self, phase: str) -> str:
        """Query rank 0 for the ranks that have not reached `phase`. Return its answer, or '' if it does not answer."""
        found = self._ask_who_is_missing(phase)
        return found.message if found else ""

    def _ask_who_is_missing(self, phase: str) -> StartupFailure | None:
        """Query rank 0 for the ranks that have not reached `phase`. Return None if it does not answer within 2 s."""
        self._send({"who": phase})
        with self._changed:
            self._changed.wait_for(lambda: self._missing is not None or bool(self._failure), 2)
            return self._failure or self._missing

    def _too_late(self, phase: str) -> StartupFailure:
        """Return the failure with rank 0's list of missing ranks. If rank 0 does not answer, blame rank 0."""
        found, here = self._ask_who_is_missing(phase), protocol.identity()["host"]
        if found and found.message:
            return found
        return self._fault_of_rank_0(
            f"does not respond any more to rank {self._world.rank} on {here}, so the missing ranks are unknown. Has "
            "one of the two nodes lost its network, or is rank 0 stopped?"
        )

    def _fault_of_rank_0(self, what: str) -> StartupFailure:
        """Return a failure that rank 0 itself caused.

        what: the text that follows 'rank 0 on ADDRESS' in the message.
        """
        at = self._world.master_addr
        return StartupFailure(f"rank 0 on {at} {what}", failure_kinds.PROGRAM, 0, at)

    def fail(self, error: str) -> None:
        self._send({"error": error[: protocol.LONGEST_ERROR]})

    def close(self) -> None:
        self._advance(Stage.OVER)  # first, so that this rank does not report rank 0 as dead
        self._send({"bye": True})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)
        self._socket.close()

    def forget(self) -> None:
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the receiving thread notices the error
            self._socket.sendall(protocol.encode(message))

    def _receive_messages(self) -> None:
        """Handle rank 0's messages until the connection ends. Runs in this client's thread."""
        try:
            while True:
                for message in protocol.receive(self._socket, self._lines):
                    self._handle(message)
        except (OSError, EOFError):  # ignored if the start-up is over or has failed; else rank 0 is dead
            self._fail(self._fault_of_rank_0("exited during start-up: read its log for the reason"))
        except protocol.NotOurs as error:
            text = f"sent data that is not a message of the rendezvous ({error}): {protocol.SAME_VERSION}"
            self._fail(self._fault_of_rank_0(text))

    def _handle(self, message: dict[str, Any]) -> None:
        """Handle a message from rank 0: advance to the stage that it announces, and store its other fields."""
        if "failed" in message:
            self._fail(StartupFailure.from_message(message, "failed"))
        if "all" in message:
            self._advance(Stage.CONNECTED)
        if "closed" in message:
            self._advance(Stage.OVER)
        try:
            if "store" in message:
                self._store_port = protocol.port(message, "store")
                self._advance(Stage.STORE)
            if "missing" in message:
                protocol.text(message, "missing")
                with self._changed:
                    self._missing = StartupFailure.from_message(message, "missing")
                    self._changed.notify_all()
        except protocol.NotOurs as error:
            if not self._warned:
                self._warned = True
                at = self._world.master_addr
                say(f"warning: ignoring an unreadable message from rank 0 on {at}: {error}; {protocol.SAME_VERSION}")

    def _not_found(self, seen: Mapping[str, str]) -> str:
        """Return the message to print if rank 0 is not found before the deadline.

        seen: the result of the last attempt at each address.
        """
        me = f"rank {self._world.rank} on {protocol.identity()['host']}"
        what = "; ".join(f"{where}: {outcome}" for where, outcome in seen.items())
        return (
            f"{me} did not find rank 0 at {self._world.master_addr}: {what}. Did rank 0 start there? Does this name "
            "resolve to the same host on this node? Does a firewall block the ports?"
        )
