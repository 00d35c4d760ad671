"""Ranks the findings to decide which one is the first cause of the failure.

If another finding explains a finding, it does not count. The verdict is the first of the remaining findings with the
highest grade.

| grade      | what shows the failure                                                      | explained by          |
|------------|-----------------------------------------------------------------------------|-----------------------|
| PROVEN     | dumps of torch's flight recorder name ranks that others wait for            | a failure of that rank|
| WAITING    | stacks: some ranks wait in a collective, and others do not                  | a failure of that rank|
| STATED     | a message of torch, NCCL or gloo names the rank that others wait for        | a failure of that rank|
| KILLED     | a signal ended a rank, and no rank had failed before                        | an abort: those, NODE |
| RAISED     | an error that no other rank causes, after which its rank printed no step    |                       |
| NODE       | Slurm reports the loss of a node                                            |                       |
| MEMORY     | Slurm reports the kernel's OOM killer                                       |                       |
| HUNG       | ranks timed out in a collective, and nothing shows for which rank they wait | any failure above     |
| ENDED      | Slurm ended the job: a time limit, scancel, a preemption                    |                       |
| STOPPED    | most ranks died of SIGTERM                                                  |                       |
| TERMINATED | a rank died of SIGTERM before Slurm ended the step                          |                       |
| INTERRUPTED| a rank was interrupted by SIGINT                                            |                       |
| NOTED      | a line without a traceback has a known message of a failure                 |                       |
| EXITED     | a launcher lists an exit status other than 0 of a rank without an error     |                       |
| EARLY      | a rank ended with status 0 while others failed                              |                       |
| DIFFERENT  | errors were raised in different collectives                                 |                       |
| UNLISTED   | all ranks that are listed failed because of one that is not                 |                       |
| MISSING    | a rank has no error, and the collective of all others timed out             |                       |
| LOST       | all errors are consequences of another rank's failure                       |                       |
| SCRIPT     | the batch script or srun failed, and no rank did                            |                       |
| NOTHING    | no failure is in the evidence                                               |                       |

"A failure of that rank" is KILLED (without an abort), RAISED, TERMINATED, EXITED or EARLY. NODE and MEMORY explain
every hang. MEMORY and NOTED explain an abort, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto

from hpcinit.base import failure_kinds
from hpcinit.why.evidence import Verdict


class Grade(IntEnum):
    """The grades of findings, highest first. The module's docstring explains them."""

    PROVEN = auto()
    WAITING = auto()
    STATED = auto()
    KILLED = auto()
    RAISED = auto()
    NODE = auto()
    MEMORY = auto()
    HUNG = auto()
    ENDED = auto()
    STOPPED = auto()
    TERMINATED = auto()
    INTERRUPTED = auto()
    NOTED = auto()
    EXITED = auto()
    EARLY = auto()
    DIFFERENT = auto()
    UNLISTED = auto()
    MISSING = auto()
    LOST = auto()
    SCRIPT = auto()
    NOTHING = auto()


HANGS = (Grade.PROVEN, Grade.WAITING, Grade.STATED, Grade.HUNG)
OF_RANKS = (Grade.KILLED, Grade.RAISED, Grade.TERMINATED, Grade.EXITED, Grade.EARLY)


@dataclass(frozen=True)
class Finding:
    """What one source of evidence shows about a failure.

    verdict: the answer to the user if this is the first cause.
    ranks: the ranks at fault, or () if unknown.
    abort: whether the failure is a SIGABRT, which torch and gloo send to their own process after another failure.
    shown: False if the finding only follows from a missing line in the log. Such a finding does not explain others.
    """

    grade: Grade
    verdict: Verdict
    ranks: tuple[int, ...] = ()
    abort: bool = False
    shown: bool = True


def explains(cause: Finding, effect: Finding) -> bool:
    """Return whether `cause` is the reason why `effect` happened."""
    if effect.abort:
        return cause.grade in (*HANGS, Grade.RAISED, Grade.NODE, Grade.MEMORY, Grade.NOTED)
    if effect.grade not in HANGS or cause.abort or not cause.shown:
        return False
    if effect.verdict.kind == failure_kinds.START_UP and cause.grade in (Grade.KILLED, Grade.RAISED):
        return True
    if cause.grade in (Grade.NODE, Grade.MEMORY):
        return True
    if not effect.ranks or not cause.ranks:
        return cause.grade in (Grade.KILLED, Grade.RAISED)
    return cause.grade in OF_RANKS and not set(cause.ranks).isdisjoint(effect.ranks)


def first(findings: Sequence[Finding]) -> Finding:
    """Return the finding that is the first cause of the failure.

    If findings have the same grade, the first in the list counts, because readers yield findings in the order of time.
    """
    left = [one for one in findings if not any(explains(other, one) for other in findings)]
    found = min(left or findings, key=lambda one: one.grade)
    named = [one for one in findings if one.grade in HANGS and len(one.ranks) == 1 and explains(found, one)]
    return _with_rank(found, named[0]) if named and not found.ranks and found.grade is Grade.RAISED else found


def _with_rank(failure: Finding, hang: Finding) -> Finding:
    """Return the failure. If its rank is unknown, add the rank for which others waited according to `hang`."""
    (rank,), known = hang.ranks, failure.verdict
    head, lines = f"{known.headline} (probably rank {rank})", (*known.evidence, hang.verdict.headline)
    verdict = replace(known, headline=head, rank=rank, host=known.host or hang.verdict.host, evidence=lines)
    return replace(failure, verdict=verdict, ranks=hang.ranks)
