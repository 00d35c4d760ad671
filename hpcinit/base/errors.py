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

# The kinds of failures: values of `kind` in hpcinit's errors, in error records and in verdicts of `hpcinit why`.
#
# Decisions (which failure came first, who is to blame, what to do) are made by these values, never by a message.

# Set where hpcinit itself raises an error, and written to the record of the rank.
PROGRAM = "program"  # any other error, of the program or of hpcinit
HANG = "hang"  # the ranks took no step for too long
START_UP = "start-up"  # a rank did not get through the rendezvous in time
PEER_LOST = "peer-lost"  # another rank failed in the rendezvous, and this one heard of it
# Recognized in the output of other programs: records/causes.py.
CUDA_MEMORY = "cuda-memory"
HOST_MEMORY = "host-memory"
SHARED_MEMORY = "shared-memory"
DISK = "disk"
IMPORT = "import"
NO_GPU = "no-gpu"
GPU = "gpu"
PORT = "port"
NOT_A_NUMBER = "not-a-number"
FILE = "file"
NETWORK = "network"
# Of a run whose ranks left no cause: from Slurm, from exit statuses, or from a person.
SIGNAL = "signal"
NODE = "node"
TIME_LIMIT = "time-limit"
REQUEUED = "requeued"
PREEMPTED = "preempted"
CANCELLED = "cancelled"
SCRIPT = "script"  # the batch script failed before a rank did
UNKNOWN = "unknown"
# Of a run in which nothing failed.
NONE = "none"
STOPPED = "stopped"  # as somebody asked it to

# Consequences of another rank's failure, and what `hpcinit why` calls them.
SECONDARY = {PEER_LOST: "died during start-up"}


INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as shells say


NOTHING_SUBMITTED = "nothing was submitted"  # the outcome of most SubmitErrors


class HpcinitError(Exception):
    """Base of all. `exit_status` is what a command line program ends with.

    kind: one of base/errors.py. rank_at_fault, host_at_fault: None and '' if they are not known. quoted: the
    words of another program in the message, or of the system; `hpcinit why` looks for their cause.
    """

    exit_status = 1
    kind = PROGRAM
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
    """report: the fields of records.hang_report.HangReport, which the message is made of."""

    kind = HANG

    def __init__(self, message: str, report: Mapping[str, Any] | None = None) -> None:
        self.report = report or {}
        super().__init__(message, rank_at_fault=self.report.get("rank"), host_at_fault=self.report.get("host", ""))


class CheckpointError(Failure):
    """A checkpoint could not be written or read."""
