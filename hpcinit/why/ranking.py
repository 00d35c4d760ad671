"""Ranks the findings to decide which one is the first cause of the failure.

A finding that another one explains does not count. Of the remaining findings, the
verdict is the first one with the highest grade.

| grade      | what shows the failure                                                      | explained by          |
|------------|-----------------------------------------------------------------------------|-----------------------|
| PROVEN     | dumps of torch's flight recorder name ranks that others wait for            | a failure of that rank|
| WAITING    | stacks: some ranks wait in a collective, and others do not                  | a failure of that rank|
| STATED     | a message of torch, NCCL or gloo names the rank that others wait for        | a failure of that rank|
| KILLED     | a signal ended a rank, and no rank had failed before                        | an abort: see below   |
| RAISED     | a rank raised an error that no other rank caused, and then printed no step  |                       |
| NODE       | Slurm reports the loss of a node                                            |                       |
| MEMORY     | Slurm reports the kernel's OOM killer                                       |                       |
| HUNG       | ranks timed out in a collective, and nothing shows for which rank they wait | any failure above     |
| ENDED      | Slurm ended the job: a time limit, scancel, a preemption                    |                       |
| STOPPED    | most ranks died of SIGTERM                                                  |                       |
| TERMINATED | a rank died of SIGTERM before Slurm ended the step                          |                       |
| INTERRUPTED| a rank was interrupted by SIGINT                                            |                       |
| NOTED      | a line outside of tracebacks contains a known message of a failure          |                       |
| EXITED     | a rank without an error exited with a status other than 0                   |                       |
| EARLY      | a rank ended with status 0 while others failed                              |                       |
| DIFFERENT  | errors were raised in different collectives                                 |                       |
| UNLISTED   | all listed ranks failed because of a rank that is not listed                |                       |
| MISSING    | a rank has no error, and the collective of all others timed out             |                       |
| LOST       | all errors are consequences of another rank's failure                       |                       |
| SCRIPT     | the batch script or srun failed, and no rank did                            |                       |
| NOTHING    | no failure is in the evidence                                               |                       |

- "A failure of that rank" is KILLED (without an abort), RAISED, TERMINATED, EXITED or EARLY.
- KILLED, RAISED and EXITED also explain why a rank did not connect.
- NODE and MEMORY explain every hang.
- An abort is explained by any hang (PROVEN, WAITING, STATED or HUNG), RAISED, NODE, MEMORY or NOTED.

A verdict is certain if its evidence proves it. Otherwise its headline starts with "probably", and `doubt` is what would
make it certain.

| verdict on                                       | is certain if all of these are true              |
|--------------------------------------------------|--------------------------------------------------|
| PROVEN, WAITING, NODE, MEMORY                    | SHOWN: dumps, stacks, Slurm, the kernel prove it |
| RAISED, STATED in records of hpcinit             | SHOWN, ONE_CAUSE, FIRST                          |
| RAISED in the log of another launcher            | SHOWN, ONE_CAUSE, FIRST, OWN, ENDED_BY_IT, READ  |
| STATED in the log of another launcher            | SHOWN, ONE_CAUSE, FIRST, READ                    |
| KILLED, HUNG, ENDED, STOPPED, TERMINATED         | SHOWN, FIRST, READ                               |
| INTERRUPTED, EXITED, EARLY, DIFFERENT, SCRIPT    | SHOWN, FIRST, READ                               |
| NOTHING, if the logs show no failure             | FINISHED                                         |
| others, shown only by one line or consequences   | never                                            |

- SHOWN: the evidence shows the rank and the cause. hpcinit did not infer them from missing lines or from the majority
  of the ranks.
- ONE_CAUSE: only one cause can lead to this message.
- FIRST: no other process has an unexplained failure, and no other rank failed at the same time.
- OWN: another process's failure could not have caused the error: the message does not mention other processes, and its
  kind is neither network nor unknown.
- ENDED_BY_IT: of all ranks whose end is unexplained, the launcher lists this one first. Without such a list, the error
  is the last output of its process.
- READ: the log is complete. hpcinit recognizes each line that looks like an error, and the last line of each process.
- FINISHED: the log shows that the program or the job completed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto

from hpcinit.base import failure_kinds
from hpcinit.base.text import brief
from hpcinit.records import causes
from hpcinit.why.evidence import Evidence, Verdict


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
UNSHOWN = "the log of the rank that failed first, which shows its error"
# Grades of failures that may be the first cause
RIVALS = (*HANGS, Grade.KILLED, Grade.RAISED, Grade.NODE, Grade.MEMORY)
# Errors that a process causes itself, even if the message names other processes
OWN_KINDS = (
    failure_kinds.CUDA_MEMORY, failure_kinds.HOST_MEMORY, failure_kinds.SHARED_MEMORY, failure_kinds.DISK,
    failure_kinds.IMPORT, failure_kinds.NO_GPU, failure_kinds.NOT_A_NUMBER,
)  # fmt: skip
OWN_ERRORS = re.compile(
    r"(?:[\w.]+\.)?(?:Type|Name|Attribute|Index|Syntax|Import|ModuleNotFound|ZeroDivision|UnboundLocal)Error\b"
    r"|.*device-side assert"
)
# Messages about other processes, and errors that a process raises when other processes are gone
OF_OTHERS = re.compile(
    r"(?i)(?<![\w-])(?:\w*connect\w*|peers?|remote|ranks?|workers?|replicas?|process(?:es)?|quorum|waited"
    r"|\w*time(?:d ?)?out\w*|sockets?|broken\w*|closed|reset|lost|abort\w*|cancel\w*|interrupt\w*|\w*gather|\w*reduce"
    r"|barrier|others?|collectives?|rendezvous\w*|heartbeats?|EOFError|(?:_?queue\.)Empty|received|\d+ of \d+)(?![\w-])"
)
OF_RANKS = (Grade.KILLED, Grade.RAISED, Grade.TERMINATED, Grade.EXITED, Grade.EARLY)


@dataclass(frozen=True)
class Finding:
    """What one source of evidence shows about a failure.

    verdict: the answer to the user if this is the first cause.
    ranks: the ranks at fault, or () if unknown.
    abort: whether the failure is a SIGABRT, which torch and gloo send to their own process after another failure.
    shown: False if only a missing line suggests the failure. Such a finding does not explain another one.
    inferred: whether hpcinit concluded the rank or the cause, because nothing shows it directly.
    message: the whole message of the error, or ''.
    together: the ranks that failed with another error at the same time, as text, or ''.
    """

    grade: Grade
    verdict: Verdict
    ranks: tuple[int, ...] = ()
    abort: bool = False
    shown: bool = True
    inferred: bool = False
    message: str = ""
    together: str = ""


def explains(cause: Finding, effect: Finding) -> bool:
    """Return whether `cause` is the reason why `effect` happened."""
    if effect.abort:
        return cause.grade in (*HANGS, Grade.RAISED, Grade.NODE, Grade.MEMORY, Grade.NOTED)
    if effect.grade not in HANGS or cause.abort or not cause.shown:
        return False
    if effect.verdict.kind == failure_kinds.START_UP and cause.grade in (Grade.KILLED, Grade.RAISED, Grade.EXITED):
        return True
    if cause.grade in (Grade.NODE, Grade.MEMORY):
        return True
    if not effect.ranks or not cause.ranks:
        return cause.grade in (Grade.KILLED, Grade.RAISED)
    return cause.grade in OF_RANKS and not set(cause.ranks).isdisjoint(effect.ranks)


def left(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that no other finding explains, or all findings if each one is explained."""
    differ = {(one.grade, one.ranks, one.abort, one.shown): one for one in findings}.values()
    explained = {
        id(one)
        for one in findings
        if (one.abort or one.grade in HANGS) and any(explains(cause, one) for cause in differ)
    }
    return [one for one in findings if id(one) not in explained] or list(findings)


def first(findings: Sequence[Finding]) -> Finding:
    """Return the finding that is the first cause of the failure.

    If findings have the same grade, the first in the list counts, because readers yield findings in the order of time.
    """
    found = min(left(findings), key=lambda one: one.grade)
    named = [one for one in findings if one.grade in HANGS and len(one.ranks) == 1 and explains(found, one)]
    return _with_rank(found, named[0]) if named and not found.ranks and found.grade is Grade.RAISED else found


def _with_rank(failure: Finding, hang: Finding) -> Finding:
    """Return the failure, whose rank is unknown, with the rank for which the others waited according to `hang`."""
    (rank,), known = hang.ranks, failure.verdict
    lines = (*known.evidence, hang.verdict.headline)
    verdict = replace(known, rank=rank, host=known.host or hang.verdict.host, evidence=lines)
    return replace(failure, verdict=verdict, ranks=hang.ranks, inferred=True)


def judged(found: Finding, findings: Sequence[Finding], evidence: Evidence) -> Verdict:
    """Return the verdict with its certainty. If it is not certain, its headline starts with 'probably'."""
    verdict, missing = replace(found.verdict, ranks=found.ranks), doubt(found, findings, evidence)
    unknown = verdict.kind == failure_kinds.UNKNOWN
    if not missing and not unknown:
        return verdict
    if (
        verdict.kind == failure_kinds.NONE
        or found.grade is Grade.NOTHING
        or (unknown and verdict.rank is None and found.grade is not Grade.RAISED)
    ):
        return replace(verdict, certain=False)  # the verdict names no cause and no rank
    return replace(verdict, headline=f"probably {verdict.headline}", certain=False, doubt=missing)


def doubt(found: Finding, findings: Sequence[Finding], evidence: Evidence) -> str:
    """Return what would make the verdict certain, or '' if its evidence proves it. The module's docstring has the rule.

    found: the finding that is reported.
    findings: all findings.
    """
    if found.grade not in NEEDS:
        return UNSHOWN
    rivals = [one for one in left(findings) if one.grade in RIVALS and not set(one.ranks) & set(found.ranks)]
    needs = OF_A_RECORD if evidence.has_clock and found.grade in (Grade.RAISED, Grade.STATED) else NEEDS[found.grade]
    return next((text for need in (*needs, _shown) if (text := need(found, rivals, evidence))), "")


def _one_cause(found: Finding, _: Sequence[Finding], __: Evidence) -> str:
    several = causes.has_several_causes(found.message)
    return "what the rank printed before this message, because the message can have several causes" if several else ""


def _first(found: Finding, rivals: Sequence[Finding], evidence: Evidence) -> str:
    if found.together:
        return f"more exact clocks, because {found.together} failed at the same time"
    others = [one for one in rivals if not (one.abort or one is found or one.verdict.error == found.verdict.error)]
    if evidence.has_clock or not others:
        return ""
    return f"the times of the failures; another failure is: {brief(others[0].verdict.headline)}"


def is_own(message: str, kind: str) -> bool:
    """Return whether a process causes this error itself, whatever happens to the other processes."""
    return kind in OWN_KINDS or bool(OWN_ERRORS.match(causes.unquoted(message)))


def is_of_others(message: str, kind: str) -> bool:
    """Return whether the failure of another process may have caused this error."""
    of_others = kind in (failure_kinds.NETWORK, failure_kinds.UNKNOWN) or OF_OTHERS.search(causes.unquoted(message))
    return bool(of_others) and not is_own(message, kind)


def _own(found: Finding, _: Sequence[Finding], evidence: Evidence) -> str:
    if evidence.size < 2 or not is_of_others(found.message, found.verdict.kind):
        return ""
    return "the last lines of the other ranks: the message is about other processes, and one may have failed first"


def _ended_by_it(found: Finding, _: Sequence[Finding], evidence: Evidence) -> str:
    rank = found.verdict.rank
    ends = [end for end in evidence.log.ends if not (end.succeeded or end.is_consequence)]
    with_error = {one.record.rank for one in evidence.found}
    for end in ends:
        if rank is None or rank in end.ranks or not end.ranks:
            return ""
        if not with_error.issuperset(end.ranks):
            return f"why {evidence.named(end.ranks)} ended: {end.how}"
    return "" if rank in evidence.last_words else "the exit status of this rank, which srun prints, or sacct -j JOB"


def _read(found: Finding, _: Sequence[Finding], evidence: Evidence) -> str:
    if evidence.skipped:
        return "the parts of the log that hpcinit did not read"
    same = found.verdict.kind
    unread = [text for text in evidence.unread if same == failure_kinds.PROGRAM or causes.kind(text)[0] != same]
    return f"the meaning of this line, which hpcinit does not recognize: {brief(unread[0])}" if unread else ""


def _shown(found: Finding, _: Sequence[Finding], __: Evidence) -> str:
    return UNSHOWN if found.inferred else ""


def _finished(_: Finding, __: Sequence[Finding], evidence: Evidence) -> str:
    return "" if evidence.finished else "how the job ended"


Need = Callable[[Finding, Sequence[Finding], Evidence], str]
OF_A_RECORD: tuple[Need, ...] = (_one_cause, _first)
NEEDS: Mapping[Grade, tuple[Need, ...]] = {
    **dict.fromkeys((Grade.PROVEN, Grade.WAITING, Grade.NODE, Grade.MEMORY), ()),
    Grade.RAISED: (_one_cause, _first, _own, _ended_by_it, _read),
    Grade.STATED: (_one_cause, _first, _read),
    **dict.fromkeys((Grade.KILLED, Grade.HUNG, Grade.ENDED, Grade.TERMINATED, Grade.INTERRUPTED), (_first, _read)),
    **dict.fromkeys((Grade.STOPPED, Grade.EXITED, Grade.EARLY, Grade.DIFFERENT, Grade.SCRIPT), (_first, _read)),
    Grade.NOTHING: (_finished,),
}
