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
        └── CheckpointError  a checkpoint could not be written or read

A message says what we looked at, what we saw, what we expected and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as shells say


class HpcinitError(Exception):
    """Base of all. `exit_status` is what a command line program ends with."""

    exit_status = 1


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
    pass


class NotReached(SubmitError):
    """The controller did not get the request: there is no job, and another attempt may succeed."""


class MaybeSubmitted(SubmitError):
    """Submitting failed in a way in which the job may exist all the same."""


class BringUpError(Failure):
    pass


class CheckpointError(Failure):
    """A checkpoint could not be written or read."""
