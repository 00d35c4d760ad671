"""Finds failures that Slurm reports: a lost node, the OOM killer, the end of the job, a failed batch script or srun."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from hpcinit.base import failure_kinds
from hpcinit.base.text import brief
from hpcinit.records import causes
from hpcinit.records.job_log import Cancelled
from hpcinit.why import setup_failure
from hpcinit.why.evidence import Evidence, Verdict, named
from hpcinit.why.ranking import Finding, Grade

MORE_TIME = (
    "request more time (time_min=...), or several jobs in a row that resume from the last checkpoint (chain=3); "
    "with run.should_stop(), the program can save before the limit"
)
EXCLUDE = "hpcinit excludes a node that fails again; to exclude it now: +cluster.sbatch.exclude="
STOP_SIGNAL = (
    "Slurm sends SIGTERM before a preemption, at the time limit and with scancel: sacct -o State,Reason shows which; "
    "with run.should_stop(), the program can save when SIGTERM arrives"
)
# A node that is up reported why it could not start the ranks. Nodes that did not answer are in JobLog.unreachable.
NOT_LAUNCHED = re.compile(r"Task launch for \S+ failed on node (\S+): (.+)")
UNFINISHED = "the logs show no failure; if the ranks had stopped making progress, the stacks and dumps show why"
REFUSED = "read the message: an option, an environment variable, a file or the time limit is wrong"


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield the failures that Slurm reports about the job and its nodes."""
    log, ended = evidence.log, evidence.log.cancelled
    lost = log.lost or tuple(evidence.nodes if evidence.state == "NODE_FAIL" else ())
    if lost or evidence.state in ("NODE_FAIL", "BOOT_FAIL") or (ended and ended.why == "NODE FAILURE"):
        yield Finding(Grade.NODE, _of_node(lost, evidence))
    elif log.unreachable:
        head = f"srun could not start the ranks on {', '.join(log.unreachable)}: slurmd did not answer there"
        do = f"the node is down, or srun's own set-up failed there (an image, a mount); {EXCLUDE}{log.unreachable[0]}"
        yield Finding(Grade.NODE, evidence.verdict(head, failure_kinds.NODE, do, host=log.unreachable[0]))
    elif found := NOT_LAUNCHED.match(log.refused):
        host, why = found.groups()
        head = f"srun could not start the ranks on {host}: {why}"
        do = f"report it to the site: slurmd's log on {host} shows why (often its clock or munge key); {EXCLUDE}{host}"
        yield Finding(Grade.NODE, evidence.verdict(head, failure_kinds.NODE, do, host=host, error=log.refused))
    if evidence.oom:
        head = f"a node {causes.OUT_OF_MEMORY}: the kernel killed one of its processes"
        verdict = evidence.verdict(head, failure_kinds.HOST_MEMORY, causes.HOST_MEMORY, evidence=(evidence.oom,))
        yield Finding(Grade.MEMORY, verdict)
    if ended or evidence.state in ("TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE"):
        yield Finding(Grade.ENDED, end(ended, evidence))
    if hosts := {one.host for one in log.not_started}:
        host = hosts.pop() if len(hosts) == 1 else ""
        ranks = tuple(sorted({rank for one in log.not_started for rank in one.ranks} if host else ()))
        who = (f"{named(ranks)} on {host}" if ranks else f"the ranks on {host}") if host else "the ranks"
        head, rank = f"{who} did not start: {log.refused}", ranks[0] if ranks else None
        kind = failure_kinds.DISK if causes.kind(log.refused)[0] == failure_kinds.DISK else failure_kinds.SCRIPT
        verdict = evidence.verdict(head, kind, REFUSED, rank=rank, host=host, error=log.refused)
        yield Finding(Grade.RAISED, verdict, ranks, inferred=not evidence.has_clock)
    yield from _of_stop_signal(evidence)
    yield from _of_script(evidence)
    yield Finding(Grade.NOTHING, _nothing(evidence))


def _of_node(lost: tuple[str, ...], evidence: Evidence) -> Verdict:
    which = ",".join(lost) or "NODE"
    lines = tuple(f"{name}: {evidence.nodes[name]}" for name in lost if evidence.nodes.get(name))
    do = f"submit again without that node: +cluster.sbatch.exclude={which}; report the node to the site"
    head = f"node {', '.join(lost)} was lost" if lost else "a node was lost"
    head += f"{evidence.at_step}: Slurm reports a node failure"
    host = lost[0] if lost else ""
    return evidence.verdict(head, failure_kinds.NODE, do, host=host, evidence=lines, resubmit=True)


def end(ended: Cancelled | None, evidence: Evidence) -> Verdict:
    """Return the verdict on a job that Slurm ended."""
    why = {"TIMEOUT": "TIME LIMIT", "PREEMPTED": "PREEMPTION"}.get(evidence.state, "") or (ended.why if ended else "")
    at = ended.at if ended else None
    when = (f", {time.strftime('%H:%M:%S', time.localtime(at))}" if at else "") + evidence.at_step
    if "TIME LIMIT" in why:
        limit = f" of {evidence.time_min} min" if evidence.time_min else ""
        head = f"the time limit{limit} ended the job{when}"
        if evidence.silence:
            first, *rest = evidence.silence.lines()
            do = f"if the ranks did not hang (hang/ has their stacks): {MORE_TIME}"
            return evidence.verdict(f"{head}, but {first}", failure_kinds.TIME_LIMIT, do, evidence=tuple(rest))
        return evidence.verdict(head, failure_kinds.TIME_LIMIT, MORE_TIME, time=at)
    if "REQUEUE" in why:
        head = f"the job was requeued{when} by its batch script, an administrator, or scontrol requeue"
        return evidence.verdict(head, failure_kinds.REQUEUED, "nothing to fix: no part of the run failed", time=at)
    if "PREEMPT" in why:
        do = "submit it again; with run.should_stop(), the program can save when Slurm sends its warning"
        head = f"preempted: a job of higher priority took the nodes{when}"
        return evidence.verdict(head, failure_kinds.PREEMPTED, do, time=at, resubmit=True)
    who = f" by {evidence.who}" if evidence.who else ""
    head = f"the job was canceled{who}{when} (scancel, hpcinit cancel, or an administrator)"
    busy = (evidence.hang or evidence.silence) if not evidence.hangs else None
    lines = busy.lines() if busy else ()
    return evidence.verdict(head, failure_kinds.CANCELLED, UNFINISHED, time=at, evidence=lines)


def _of_stop_signal(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if SIGTERM was sent to the whole job step.

    SIGTERM must have ended most ranks or a DataLoader worker, or the program must have handled it and exited with 143.
    """
    ended = [one.record for one in evidence.found if causes.STOPPED_BY_SIGTERM.search(one.record.foreign)]
    died = {rank for one in evidence.log.ends if not one.after_abort and one.how == "Terminated" for rank in one.ranks}
    if not ended and not (evidence.size > 1 and 2 * len(died) > evidence.size):
        return
    if evidence.preempted:
        yield Finding(Grade.STOPPED, end(Cancelled("PREEMPTION", "", None), evidence))
        return
    lines = tuple(f"{evidence.named([one.rank])}: {causes.short(one.error)}" for one in ended[:2])
    head = f"the ranks were terminated by SIGTERM{evidence.at_step}, and its sender is unknown"
    yield Finding(Grade.STOPPED, evidence.verdict(head, failure_kinds.SIGNAL, STOP_SIGNAL, evidence=lines))


def _of_script(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if the batch script ended before any rank reported an error."""
    if evidence.setup and evidence.setup.ended:
        yield Finding(Grade.SCRIPT, setup_failure.verdict(evidence.setup))
    output, status = evidence.log.output, evidence.exit_status
    if evidence.log.refused and not (output or status):
        head = f"Slurm could not start the program: {evidence.log.refused}"
        yield Finding(Grade.SCRIPT, evidence.verdict(head, failure_kinds.SCRIPT, REFUSED, error=evidence.log.refused))
    elif output or status:
        head = f"the batch script ended with exit status {status} and no rank reported an error"
        head += f": {output[-1]}" if output else ""
        do = "read the lines above it in the job's log: modules, cluster.setup, srun"
        if status == 127:  # of the shell
            do = "a command was not found: check cluster.modules, cluster.setup, cluster.venv"
        error = (output or ("",))[-1]
        verdict = evidence.verdict(head, failure_kinds.SCRIPT, do, evidence=output[:-1], error=error)
        yield Finding(Grade.SCRIPT, verdict)


def _nothing(evidence: Evidence) -> Verdict:
    if evidence.cut:
        ranks = [rank for rank in evidence.cut if rank >= 0]
        head = "the cause is unknown: the log ends inside a traceback" + (f" of {named(ranks)}" if ranks else "")
        return evidence.verdict(head, failure_kinds.UNKNOWN, "read the rest of the log, or the logs of the other ranks")
    if evidence.alarms:
        head = f"the cause is unknown; the last line that may show a failure: {brief(evidence.alarms[-1][1])}"
        return evidence.verdict(head, failure_kinds.UNKNOWN, "read the log around this line")
    if evidence.trains and evidence.state in ("UNKNOWN", "COMPLETED"):
        handled = tuple(
            f"an error, after which the process continued training: {text}" for text in evidence.handled[:3]
        )
        end = "" if evidence.finished else "; how the job ended is unknown"
        return evidence.verdict(f"the logs show no failure{end}", failure_kinds.NONE, "", evidence=handled)
    if not evidence.has_clock and evidence.state == "UNKNOWN":
        head = "the cause is unknown: the logs contain no failure message that hpcinit recognizes"
        return evidence.verdict(head, failure_kinds.UNKNOWN, "read the end of the log")
    about = f"{evidence.state} ({evidence.reason})" if evidence.reason else evidence.state
    head = f"the cause is unknown: Slurm's state is {about}"
    return evidence.verdict(head, failure_kinds.UNKNOWN, "scontrol show job")
