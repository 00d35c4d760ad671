"""Every error that hpcinit raises on purpose.

    HpcinitError
    ├── RequestError         the request is wrong; nothing was started          exit status 2
    │   ├── NodelistError    a host list that Slurm would not have written
    │   ├── WorldError       the environment of a rank contradicts itself
    │   ├── SpecError        a run folder's spec.json cannot be used
    │   └── ConfigError      config or overrides; may carry several problems
    └── Failure              the request was right and could not be carried out  exit status 1
        ├── SubmitError      sbatch or the local engine refused
        │   ├── NotReached       the controller did not get the request: there is no job
        │   └── MaybeSubmitted   or gave no clear answer: look before you submit again
        ├── BringUpError     the process group did not come up as asked
        ├── TrainingHang     the ranks took no step for too long
        └── CheckpointError  a checkpoint could not be written or read

A message says what we looked at, what we saw, what we expected and what to do. It is for people: what another part of
hpcinit must know about an error is a field of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcinit.facts import failure_kinds

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as shells say


NOTHING_SUBMITTED = "nothing was submitted"  # the outcome of most SubmitErrors


class HpcinitError(Exception):
    """Base of all. `exit_status` is what a command line program ends with.

    kind: one of facts/failure_kinds.py. rank_at_fault, host_at_fault: None and '' if they are not known. quoted: the
    words of another program in the message, or of the system; `hpcinit why` looks for their cause.
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


class RequestError(HpcinitError):
    exit_status = 2


class NodelistError(RequestError, ValueError):
    """Text that is not a Slurm nodelist; the message points at the column."""


class WorldError(RequestError):
    """Rank, size or master cannot be told from this environment."""


class SpecError(RequestError):
    """`spec.json` is missing, unreadable, or of another version."""


class ConfigError(RequestError):
    """One or more problems in the config, all found in the same pass.

    `problems` holds one complete message each.
    """

    def __init__(self, *problems: str) -> None:
        self.problems: Sequence[str] = problems
        super().__init__("\n".join(problems))


class Failure(HpcinitError):
    pass


class SubmitError(Failure):
    """problem: the message without its last clause. outcome: that clause, which says what became of the submission.

    A caller that knows more about the outcome raises the problem with an outcome of its own.
    """

    def __init__(self, problem: str = "", outcome: str = "", separator: str = "; ") -> None:
        self.problem, self.outcome = problem, outcome
        super().__init__(f"{problem}{separator}{outcome}" if outcome else problem)


class NotReached(SubmitError):
    """The controller did not get the request: there is no job, and another attempt may succeed."""


class MaybeSubmitted(SubmitError):
    """Submitting failed in a way in which the job may exist all the same."""


class BringUpError(Failure):
    pass


class TrainingHang(Failure):
    """report: the fields of hangs.HangReport, which the message is made of."""

    kind = failure_kinds.HANG

    def __init__(self, message: str, report: Mapping[str, Any] | None = None) -> None:
        self.report = report or {}
        super().__init__(message, rank_at_fault=self.report.get("rank"), host_at_fault=self.report.get("host", ""))


class CheckpointError(Failure):
    """A checkpoint could not be written or read."""
