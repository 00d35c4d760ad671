"""The reasons for which training stops early, and how much time is reserved for the last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from signal import SIGTERM, Signals

from hpcinit.base.errors import RequestError

SIGNALS = ("USR1", "USR2", "TERM", "HUP", "CONT", None)
# Slurm checks warning times every 30 s and may send the signal up to 60 s early (sbatch(1), --signal).
SIGNAL_EARLY = timedelta(seconds=60)
# At most this share of the time left at start-up is reserved. Otherwise, a short job would stop at its first step.
LARGEST_SHARE = 0.2


class Reason(IntEnum):
    """A reason to stop training early. If ranks have different reasons, the reason with the largest value counts."""

    ENDED = 1  # SIGTERM of unknown origin
    TIME_LIMIT = 2
    USER = 3
    PREEMPTED = 4

    def __str__(self) -> str:
        return _TEXTS[self]

    @property
    def token(self) -> str:
        """Return the name of the reason as stopped.json contains it. hpcinit.after compares this name."""
        return self.name.lower()


NOT_RECORDED = "not_recorded"  # in stopped.json instead of a Reason, until the ranks agree on one
_TEXTS = {
    Reason.ENDED: "terminated by SIGTERM",
    Reason.TIME_LIMIT: "time limit",
    Reason.USER: "requested by the user",
    Reason.PREEMPTED: "preempted",
}


def sentence(token: str) -> str:
    """Return the text for a reason in stopped.json. Unknown reasons, for example of a later version, stay unchanged."""
    known = {reason.token: str(reason) for reason in Reason}
    return {**known, NOT_RECORDED: "the reason was not recorded"}.get(token, token)


@dataclass(frozen=True)
class Stop:
    """The decision of all ranks to stop at the current step.

    rank: the lowest rank that has this reason to stop.
    """

    reason: Reason
    rank: int

    def __str__(self) -> str:
        return f"{self.reason} (rank {self.rank})"


@dataclass(frozen=True)
class Stopping:
    """The settings that control how ranks stop early.

    margin_s: the time reserved for the last checkpoint.
    every_steps: how often, in steps, the ranks agree whether to stop. None: hpcinit chooses, so that this costs less
        than 1 % of the time.
    signal: the signal that sbatch's --signal sends, such as 'USR1', or '' for none.
    continues: whether another job of a chain, or a restart, continues the run.
    """

    margin_s: float = 60.0
    every_steps: int | None = None
    signal: str = ""
    continues: bool = False

    def __post_init__(self) -> None:
        if self.margin_s < 0 or (self.every_steps is not None and self.every_steps < 1):
            raise RequestError(
                f"stop.margin_s is {self.margin_s:g} and stop.every_steps is {self.every_steps}, expected 0 or more "
                "seconds, and 1 or more steps"
            )

    @property
    def numbers(self) -> set[Signals]:
        """Return the signals after which a rank saves and stops."""
        return {SIGTERM, *({Signals[f"SIG{self.signal}"]} if self.signal else ())}

    def margin(self, had: timedelta, longest_save: timedelta) -> timedelta:
        """Return how much time to reserve for the last checkpoint: margin_s plus the time of two saves.

        In a short job, less time is reserved, so that most of the job's time remains for training.

        had: how much time the job had left at start-up.
        longest_save: how long the longest save took.
        """
        wanted = timedelta(seconds=self.margin_s) + 2 * longest_save
        return min(wanted, max(LARGEST_SHARE * had, longest_save))
