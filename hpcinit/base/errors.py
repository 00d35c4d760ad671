"""Defines the errors that hpcinit raises on purpose.

    HpcinitError
    ├── RequestError         the request is wrong; nothing was started          exit status 2
    │   ├── NodelistError    not a valid Slurm nodelist
    │   ├── WorldError       the environment of a rank is inconsistent
    │   ├── SpecError        a run folder's spec.json cannot be used
    │   └── ConfigError      config or overrides; contains all problems found
    └── Failure              the request was valid, but failed               exit status 1
        ├── SubmitError      sbatch or the local engine refused
        │   ├── NotReached       the controller did not receive the request: there is no job
        │   └── MaybeSubmitted   the answer is unclear: check before you submit again
        ├── BringUpError     the process group could not be initialized
        ├── TrainingHang     no rank finished a step for too long
        └── CheckpointError  a checkpoint could not be written or read

A message has four parts: what is wrong, what was expected, why, and what to type. Messages are for people; code reads
the fields of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import failure_kinds

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as in shells
NOTHING_SUBMITTED = "nothing was submitted"  # the outcome of most SubmitErrors
FIELDS = ("kind", "rank_at_fault", "host_at_fault", "quoted")  # of every HpcinitError, in records and in --json


class HpcinitError(Exception):
    """Base class of all errors that hpcinit raises on purpose.

    Attributes:
        exit_status: the exit status of a command that ends with this error.
        kind: one of the kinds in base/failure_kinds.py.
        rank_at_fault: the rank that failed first, or None if it is unknown.
        host_at_fault: the host that failed first, or '' if it is unknown.
        quoted: the part of the message that another program or the system wrote; `hpcinit why` searches it.
    """

    exit_status = 1
    kind = failure_kinds.PROGRAM
    rank_at_fault: int | None = None
    host_at_fault = ""
    quoted = ""

    def __init__(
        self,
        *args: object,
        kind: str = "",
        rank_at_fault: int | None = None,
        host_at_fault: str = "",
        quoted: str = "",
    ) -> None:
        super().__init__(*args)
        self.kind = kind or self.kind
        self.rank_at_fault, self.host_at_fault, self.quoted = rank_at_fault, host_at_fault, quoted

    def document(self) -> dict[str, Any]:
        """Return the error as `--json` prints it: the message, the class, and fields for programs."""
        fields = {name: getattr(self, name) for name in FIELDS}
        return {"error": str(self), "type": type(self).__name__, "problems": [str(self)], **fields}


class RequestError(HpcinitError):
    """The request is wrong, and nothing was started."""

    exit_status = 2
    kind = failure_kinds.REQUEST


class NodelistError(RequestError, ValueError):
    """The text is not a Slurm nodelist. The message marks the column of the error."""


class WorldError(RequestError):
    """The rank, world size or master address can't be determined from this environment."""


class SpecError(RequestError):
    """The run folder's `spec.json` is missing, unreadable, invalid, or from a different version of hpcinit."""


class ConfigError(RequestError):
    """The config has problems. All of them are reported together.

    problems: the problems, one complete message each.
    """

    def __init__(self, *problems: str) -> None:
        self.problems: Sequence[str] = problems
        super().__init__("\n".join(problems))

    def document(self) -> dict[str, Any]:
        """Return the error as `--json` prints it, with a list of all problems."""
        return {**super().document(), "problems": list(self.problems)}


class Failure(HpcinitError):
    """The request was valid, but carrying it out failed."""


class Interrupted(HpcinitError):
    """Ctrl-C ended the command."""

    exit_status = INTERRUPTED
    kind = failure_kinds.INTERRUPTED


class SubmissionInterrupted(KeyboardInterrupt):
    """Ctrl-C interrupted a submission.

    runs: the folders of the runs that were submitted before the interruption.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        made = f"submitted before the interruption: {', '.join(map(str, runs))}" if runs else NOTHING_SUBMITTED
        super().__init__(made)
        self.runs = runs


class SubmitError(Failure):
    """The submission failed.

    problem: what went wrong.
    outcome: the end of the message, which states whether there is a job.
    """

    kind = failure_kinds.SUBMISSION

    def __init__(self, problem: str = "", outcome: str = "", separator: str = "; ") -> None:
        self.problem, self.outcome = problem, outcome
        super().__init__(f"{problem}{separator}{outcome}" if outcome else problem)


class NotReached(SubmitError):
    """The request did not reach Slurm's controller. There is no job, so trying again is safe."""


class MaybeSubmitted(SubmitError):
    """The submission failed, but it might have created a job."""


class BringUpError(Failure):
    """The process group could not be initialized."""


class TrainingHang(Failure):
    """No rank has finished a step within the allowed time."""

    kind = failure_kinds.HANG


class CheckpointError(Failure):
    """A checkpoint could not be written or read."""
