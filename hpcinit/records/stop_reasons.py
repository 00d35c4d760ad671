"""Why a training is asked to stop before its end, and how much time it keeps for its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from signal import SIGTERM, Signals

from hpcinit.base.errors import RequestError

SIGNALS = ("USR1", "USR2", "TERM", "HUP", "CONT", None)
# Slurm looks at warning times once in 30 s and may send the signal as much as 60 s early (sbatch(1), --signal).
SIGNAL_EARLY = timedelta(seconds=60)
LARGEST_SHARE = 0.2  # of the time that a job had when it came up: a short one would stop before its first step


class Reason(IntEnum):
    """Where ranks see several reasons, the largest is told."""

    ENDED = 1  # SIGTERM, and nobody says from whom
    TIME_LIMIT = 2
    USER = 3
    PREEMPTED = 4

    def __str__(self) -> str:
        return _WORDS[self]

    @property
    def token(self) -> str:
        """Its name in stopped.txt, as lib/reason.sh compares it."""
        return self.name.lower()


NOT_RECORDED = "not_recorded"  # in stopped.txt instead of a Reason, until the ranks agree on one
_WORDS = {
    Reason.ENDED: "told to end",
    Reason.TIME_LIMIT: "time limit",
    Reason.USER: "asked by the user",
    Reason.PREEMPTED: "preempted",
}


def sentence(token: str) -> str:
    """Return the words for a reason in stopped.txt; a token of another version as it is."""
    known = {reason.token: str(reason) for reason in Reason}
    return {**known, NOT_RECORDED: "the reason was not recorded"}.get(token, token)


@dataclass(frozen=True)
class Stop:
    """All ranks agreed to stop at this step. rank: the lowest of those that saw the reason."""

    reason: Reason
    rank: int

    def __str__(self) -> str:
        return f"{self.reason} (rank {self.rank})"


@dataclass(frozen=True)
class Stopping:
    """margin_s: kept for the last checkpoint. every_steps: ranks agree so often; None: as often as costs under 1 %.

    signal: name of the one that --signal sends, as in 'USR1'; '' for none.
    """

    margin_s: float = 60.0
    every_steps: int | None = None
    signal: str = ""

    def __post_init__(self) -> None:
        if self.margin_s < 0 or (self.every_steps is not None and self.every_steps < 1):
            raise RequestError(
                f"stop: margin {self.margin_s:g} s, every {self.every_steps} steps; expected 0 or more, and 1 or more"
            )

    @property
    def numbers(self) -> set[Signals]:
        """The signals that ask a rank to save and stop."""
        return {SIGTERM, *({Signals[f"SIG{self.signal}"]} if self.signal else ())}

    def margin(self, had: timedelta, longest_save: timedelta) -> timedelta:
        """How much of the job's time is kept: enough to write a checkpoint twice. had: what was left at the start."""
        wanted = timedelta(seconds=self.margin_s) + 2 * longest_save
        return min(wanted, max(LARGEST_SHARE * had, longest_save))
