"""Every other rank's side: knocks at the candidates until the door of its own job opens."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hpcinit.facts import failure_kinds as kinds
from hpcinit.facts.errors import BringUpError, WorldError
from hpcinit.facts.saying import say
from hpcinit.facts.world import World
from hpcinit.runtime.meeting import card, failure, knocking, wire
from hpcinit.runtime.meeting.failure import StartupFailure
from hpcinit.runtime.meeting.party import Party

# Between two rounds of knocking, growing: ranks that start at the same time must not wait long for rank 0 to be
# the slower one, and thousands of ranks must not knock for minutes at that rate.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 1.0
KNOCKING_RANKS = 4096  # with more, each pauses for longer: rank 0's node gets no more knocks than from so many
# Of connections that wait to be accepted Linux keeps this many (net.core.somaxconn), drops the rest, and those come
# again after 1, 3, 7, 15 s. More ranks than that spread themselves over about the time that rank 0 needs for them
# anyway (docs/performance.md).
QUEUE, EACH_S = 4096, 0.00025
LONGEST_SILENCE_S = 60.0  # that a rank listens to one who says nothing


def spread_s(world_size: int) -> float:
    """How long a rank waits before it connects, where all of them would at the same moment."""
    return random.uniform(0, world_size * EACH_S) if world_size > QUEUE else 0.0


class Visit(Party):
    """A connection to rank 0's door, from the first knock until everybody is up.

    resolve: gives the addresses to try, anew each time (a name may resolve a moment later), or raises WorldError with
    the reason why there is none. deadline: on the monotonic clock. nat: rank 0 is at a translated address. Raises
    BringUpError, with what was seen at each port, if the door does not open by then.
    """

    def __init__(
        self,
        world: World,
        resolve: Callable[[], list[str]],
        key: str,
        job: str,
        made_of: Mapping[str, str],
        deadline: float,
        nat: bool = False,
    ) -> None:
        super().__init__()
        self._world = world
        self._claim = knocking.Claim(world.rank, key, job, made_of, nat)
        self._closed = self._reported = False
        self._missing: StartupFailure | None = None
        self._socket, self._lines, self.program_port, said, offset = self._find(resolve, deadline)
        if offset.known:
            self.clock_offset_s, self.clock_uncertainty_s = offset.known
        self.address = str(self._socket.getpeername()[0])
        self.own_address = str(self._socket.getsockname()[0])
        for message in said:
            self._take(message)
        self._socket.settimeout(None)
        self._thread = threading.Thread(target=self._listen, name="hpcinit-visit", daemon=True)
        self._thread.start()

    def _find(self, resolve: Callable[[], list[str]], deadline: float) -> knocking.Welcome:
        seen: dict[str, str] = {}
        listen_s: dict[str, float] = {}
        pause, longest_pause = FIRST_PAUSE_S, LAST_PAUSE_S * max(1.0, self._world.world_size / KNOCKING_RANKS)
        time.sleep(spread_s(self._world.world_size))
        while True:
            try:
                for address in resolve():
                    for port in self._world.master_ports:
                        where = f"{address}:{port}"
                        silence_s = listen_s.get(where, knocking.KNOCK_S)
                        patience = max(0.1, min(silence_s, deadline - time.monotonic()))
                        try:
                            return knocking.knock(address, port, self._claim, patience, deadline)
                        except wire.NotOurs as error:
                            seen[where] = str(error)
                            # It may be our door behind a crowd: who gives up goes to the end of the queue.
                            if isinstance(error, knocking.Silent):
                                listen_s[where] = min(LONGEST_SILENCE_S, 2 * silence_s)
            except WorldError as error:
                seen[self._world.master_addr] = str(error)
            if time.monotonic() > deadline:
                raise BringUpError(self._no_door(seen), rank_at_fault=0, host_at_fault=self._world.master_addr)
            time.sleep(pause * random.uniform(0.5, 1.5))  # thousands of ranks must not knock in step
            pause = min(longest_pause, pause * 1.5)

    def tell(self, phase: str) -> None:
        self._send({"phase": phase})

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        self._wait(lambda: self._store_is_told() or self._closed, "imported", deadline, every_s)
        if not self._store_is_told():
            raise BringUpError(
                f"rank 0 on {self._world.master_addr} has ended its part in the start-up, and rank {self._world.rank} "
                "is in init: does every rank of the program call hpcinit.init()?"
            )
        return super().wait_for_store(deadline, every_s)

    def missing(self, phase: str) -> str:
        """Asks rank 0; '' if it does not answer."""
        found = self._ask_who_is_missing(phase)
        return found.message if found else ""

    def _ask_who_is_missing(self, phase: str) -> StartupFailure | None:
        self._send({"who": phase})
        with self._changed:
            self._changed.wait_for(lambda: self._missing is not None or bool(self._failure), 2)
            return self._failure or self._missing

    def _still_waiting(self, phase: str) -> None:
        """One voice is enough."""

    def _too_late(self, phase: str) -> StartupFailure:
        found, here = self._ask_who_is_missing(phase), card.identity()["host"]
        if found:
            return found
        return self._of_rank_0(
            f"does not answer rank {self._world.rank} on {here} any more, so who is missing cannot be told: has one of "
            "the two nodes lost its network, or is rank 0 frozen?"
        )

    def _of_rank_0(self, what: str) -> StartupFailure:
        at = self._world.master_addr
        return StartupFailure(f"rank 0 on {at} {what}", kinds.PROGRAM, 0, at)

    def fail(self, error: str) -> None:
        self._send({"error": error[: wire.LONGEST_ERROR]})

    def tell_the_late(self) -> None:
        """They come to rank 0."""

    def close(self) -> None:
        self._closed = True  # nor does this rank take rank 0's leave for a death
        self._send({"bye": True})
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2)
        self._socket.close()

    def forget(self) -> None:
        self._socket.close()

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the listening thread finds out
            self._socket.sendall(wire.encode(message))

    def _listen(self) -> None:
        try:
            while True:
                for message in wire.receive(self._socket, self._lines):
                    self._take(message)
        except (OSError, EOFError):
            # All are up, or rank 0's program needed no more and it said so; else rank 0 is gone.
            if not self._closed and not self._failure:
                self._failed(self._of_rank_0("ended during start-up; its log says why"))
        except wire.NotOurs as error:
            text = f"sent something that is no message of the rendezvous ({error}): {knocking.SAME_VERSION}"
            self._failed(self._of_rank_0(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._failed(failure.of(message, "failed"))
        with self._changed:
            self._all_came |= "all" in message
            self._closed |= "closed" in message
            try:
                if "store" in message:
                    self._store_port = wire.port(message, "store")
                if "missing" in message:
                    wire.text(message, "missing")
                    self._missing = failure.of(message, "missing")
            except wire.NotOurs as error:
                self._ignored(error)
            self._changed.notify_all()

    def _ignored(self, error: wire.NotOurs) -> None:
        if not self._reported:
            self._reported = True
            say(
                f"warning: rank 0 on {self._world.master_addr} sent a message that is not understood and is ignored: "
                f"{error}; {knocking.SAME_VERSION}"
            )

    def _failed(self, reason: StartupFailure) -> None:
        with self._changed:
            self._failure = self._failure or reason
            act = self._on_failure
            self._changed.notify_all()
        if act:
            act(reason.message)

    def _no_door(self, seen: Mapping[str, str]) -> str:
        me = f"rank {self._world.rank} on {card.identity()['host']}"
        what = "; ".join(f"{where}: {outcome}" for where, outcome in seen.items())
        return (
            f"{me} did not find rank 0 at {self._world.master_addr}: {what}. Did rank 0 start there, does the name "
            "mean the same host on this node, does a firewall stand between?"
        )
