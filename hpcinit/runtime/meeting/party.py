"""What both sides of a meeting do: wait for what the others do, and hear of what goes wrong."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from hpcinit.runtime.meeting.failure import StartupFailure


class Party(ABC):
    """One process's part in the meeting.

    address: where rank 0 was met. own_address: of this node, as seen from there. program_port: for a program's own
    rendezvous. failure: why the start-up has failed, '' while it has not. clock_offset_s: to be added to a time of this
    node (seconds since 1970) for rank 0's, right to within clock_uncertainty_s; None where it was not learnt.
    """

    address = ""
    own_address = ""
    program_port = 0
    clock_offset_s: float | None = None
    clock_uncertainty_s: float | None = None

    def __init__(self) -> None:
        self._failure: StartupFailure | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._changed = threading.Condition()
        self._all_came = False
        self._store_port: int | None = None

    @property
    def failure(self) -> str:
        return self._failure.message if self._failure else ""

    @abstractmethod
    def tell(self, phase: str) -> None:
        """How far this rank has got: one of roll.PHASES."""

    @abstractmethod
    def missing(self, phase: str) -> str:
        """Who has not got that far; '' if that cannot be told."""

    @abstractmethod
    def fail(self, error: str) -> None:
        """This rank raised: tell all others why. This rank knows."""

    @abstractmethod
    def tell_the_late(self) -> None:
        """After fail(): give those who have not come yet a moment to hear of it. Rank 0 alone has something to do."""

    @abstractmethod
    def close(self) -> None:
        """Leave in peace: nobody takes it for a death."""

    @abstractmethod
    def forget(self) -> None:
        """Close this process's copies of the sockets; they live on in the parent."""

    def wait_for_all(self, deadline: float, every_s: float) -> None:
        """Until all ranks have come. Raises BringUpError that names who has not.

        deadline: on the monotonic clock. every_s: rank 0 says so often for whom it waits.
        """
        self._wait(lambda: self._all_came, "started", deadline, every_s)

    def wait_for_store(self, deadline: float, every_s: float) -> int:
        """Until all ranks are in init; the port of torch's store. Raises BringUpError that names who is not."""
        self._wait(self._store_is_told, "imported", deadline, every_s)
        assert self._store_port is not None
        return self._store_port

    def on_failure(self, act: Callable[[str], None] | None) -> None:
        """Call `act` when a rank fails, at once if one has already; None: nobody looks any more."""
        with self._changed:
            self._on_failure = act
            failure = self._failure
        if act and failure:
            act(failure.message)

    def _store_is_told(self) -> bool:
        return self._store_port is not None

    def _wait(self, done: Callable[[], bool], phase: str, deadline: float, every_s: float) -> None:
        said = time.monotonic()
        with self._changed:
            while not (self._failure or done()) and (now := time.monotonic()) <= deadline:
                if now - said > every_s:
                    said = now
                    self._still_waiting(phase)
                self._changed.wait(max(0.05, min(every_s, deadline - now)))
            if done() and not self._failure:
                return
        raise (self._failure or self._too_late(phase)).error()

    @abstractmethod
    def _still_waiting(self, phase: str) -> None:
        """Say so, or leave it to rank 0."""

    @abstractmethod
    def _too_late(self, phase: str) -> StartupFailure:
        """The deadline has passed: what to report, for this rank and whoever listens."""
