"""How a run came to its end where no rank says what happened, or at most that another one is gone."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcinit.facts import beats, causes, hangs
from hpcinit.facts import failure_kinds as kinds
from hpcinit.facts.error_records import ErrorRecord
from hpcinit.facts.evidence import Evidence, Verdict
from hpcinit.facts.job_log import Cancelled, End
from hpcinit.facts.ranges import brief

MORE_TIME = (
    "more time (time_min=...), or several jobs one after the other that go on from the last checkpoint (chain=3); "
    "run.should_stop() saves before the limit"
)
LEAVE_OUT = "hpcinit leaves out a node that does it again; at once: +cluster.sbatch.exclude="
GONE = "a rank or its node went away without a word; the others only tell that it is gone"
FLIGHT = "torchfrtrace on flight/ in the run folder shows each rank's collectives, with the lines that called them"
HANG = "hang/ in the run folder has the stacks of all ranks; hang.action=end ends such a run by itself"


def of_slurm(evidence: Evidence) -> Verdict | None:
    """What Slurm itself has done or seen; None where it has not."""
    log, ended = evidence.log, evidence.log.cancelled
    lost = log.lost or tuple(evidence.nodes if evidence.state == "NODE_FAIL" else ())
    if lost or evidence.state in ("NODE_FAIL", "BOOT_FAIL") or (ended and ended.why == "NODE FAILURE"):
        return _of_node(lost, evidence)
    if log.unreachable:
        which = ", ".join(log.unreachable)
        head = f"srun could not start the ranks on {which}: its slurmd gave no answer"
        do = f"the node is away, or srun's own set-up failed there (an image, a mount); {LEAVE_OUT}{log.unreachable[0]}"
        return _verdict(evidence, head, kinds.NODE, do, host=log.unreachable[0])
    if evidence.oom:
        said = "a node's memory for this job is used up: the kernel killed a process of it"
        return _verdict(evidence, said, kinds.HOST_MEMORY, causes.HOST_MEMORY, evidence=(evidence.oom,))
    if evidence.hang or evidence.flight:
        return of_hang(evidence) if evidence.hang else _of_flight(evidence)
    if ended or evidence.state in ("TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE"):
        return _of_end(ended, evidence)
    return None


def without_record(evidence: Evidence) -> Verdict:
    """Where Slurm has done nothing either: a rank's exit status, the batch script's, or nothing at all."""
    recorded = {one.record.rank for one in evidence.found}
    for end in evidence.log.ends:
        alone = [rank for rank in end.ranks if rank not in recorded]
        if end.how.startswith("Exited with") and alone:
            return _of_exit(end, alone[0], evidence)
    if evidence.found:
        return _verdict(
            evidence, GONE, kinds.UNKNOWN, "read the job's log, and the logs of ranks without an error record"
        )
    said = evidence.log.said
    if said or evidence.exit_status:
        head = f"the batch script ended with exit status {evidence.exit_status} and no rank left an error"
        head += f": {said[-1]}" if said else ""
        return _verdict(evidence, head, kinds.SCRIPT, _of_status(evidence.exit_status), evidence=said[:-1])
    about = f"{evidence.state} ({evidence.reason})" if evidence.reason else evidence.state
    return _verdict(evidence, f"nothing says why: Slurm's state is {about}", kinds.UNKNOWN, "scontrol show job")


def of_hang(evidence: Evidence, record: ErrorRecord | None = None) -> Verdict:
    """record: of the rank that reported the hang, for a run whose report is lost."""
    report = evidence.hang or hangs.of_record(record)
    stopped = report.state == beats.STOPPED
    do = "somebody stopped that process (SIGSTOP, a debugger, a node's guard); " * stopped + HANG
    about = report.headline
    rest = (*(line for line in report.lines() if line != about), *found_in(evidence))
    head = f"the training hung: {about}"
    return _verdict(evidence, head, kinds.HANG, do, rank=report.rank, host=report.host, evidence=rest)


def _of_flight(evidence: Evidence) -> Verdict:
    """Ranks ended at the timeout of a collective, and torch has left what each of them was in."""
    first, *rest = evidence.flight.lines()
    culprit = next(iter(evidence.flight.culprits), None)
    do = f"{culprit.advice}; {FLIGHT}" if culprit else FLIGHT
    rank, host = (culprit.rank, culprit.host) if culprit else (None, "")
    return _verdict(evidence, f"a collective hung: {first}", kinds.HANG, do, rank=rank, host=host, evidence=tuple(rest))


def found_in(evidence: Evidence) -> list[str]:
    return [f"flight recorder: {line}" for line in evidence.flight.lines()]


def _verdict(found: Evidence, headline: str, kind: str, do: str, **more: object) -> Verdict:
    return Verdict(headline, kind, do, step=found.step, **more)  # type: ignore[arg-type]


def _of_node(lost: Sequence[str], found: Evidence) -> Verdict:
    which = ",".join(lost) or "NODE"
    lines = tuple(f"{name}: {found.nodes[name]}" for name in lost if found.nodes.get(name))
    do = f"submit again, without that node: +cluster.sbatch.exclude={which}; the site should know"
    head = f"node {', '.join(lost)} was lost" if lost else "a node was lost"
    head += f"{found.at_step}: Slurm says node failure"
    return _verdict(found, head, kinds.NODE, do, host=lost[0] if lost else "", evidence=lines, resubmit=True)


def _of_end(ended: Cancelled | None, found: Evidence) -> Verdict:
    why = {"TIMEOUT": "TIME LIMIT", "PREEMPTED": "PREEMPTION"}.get(found.state, "") or (ended.why if ended else "")
    at = ended.at if ended else None
    when = (f", {time.strftime('%H:%M:%S', time.localtime(at))}" if at else "") + found.at_step
    if "TIME LIMIT" in why:
        limit = f" of {found.time_min} min" if found.time_min else ""
        return _verdict(found, f"the time limit{limit} ended the job{when}", kinds.TIME_LIMIT, MORE_TIME, time=at)
    if "REQUEUE" in why:
        head = f"the job was requeued{when}: by its batch script, an administrator, or scontrol requeue"
        return _verdict(found, head, kinds.REQUEUED, "nothing of the run's own failed", time=at)
    if "PREEMPT" in why:
        do = "submit it again; run.should_stop() saves on the warning"
        return _verdict(found, f"a job of higher priority took the nodes{when}", kinds.PREEMPTED, do, time=at)
    who = f" by {found.who}" if found.who else ""
    head = f"the job was cancelled{who}{when}: scancel, hpcinit cancel, or an administrator"
    return _verdict(found, head, kinds.CANCELLED, "nothing of the run's own failed", time=at)


def _of_exit(end: End, rank: int, found: Evidence) -> Verdict:
    tail = found.tails.get(rank, "")
    kind, do = causes.kind(tail)
    head = f"rank {rank} on {end.host} ended first{found.at_step}, {end.how.lower()}"
    head += f": {brief(tail)}" if tail else ""
    do = do if kind != kinds.PROGRAM else "its log has its last words"
    return _verdict(found, head, kind, do, rank=rank, host=end.host)


def _of_status(status: int | None) -> str:
    if status == 127:
        return "a command was not found: cluster.modules, cluster.setup, cluster.venv"
    return "the lines above it in the job's log: modules, cluster.setup, srun"
