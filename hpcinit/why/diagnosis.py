"""Find the failure that came first in all the evidence of a run. Evidence in, a Verdict out; nothing is read here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcinit.base import errors as kinds
from hpcinit.base.text import brief, ranges
from hpcinit.records import causes, hang_report, heartbeats
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.job_log import Cancelled, End, JobLog
from hpcinit.why.evidence import AGREE_S, Evidence, Verdict

# How a run came to its end where no rank says what happened, or at most that another one is gone.

MORE_TIME = (
    "more time (time_min=...), or several jobs one after the other that go on from the last checkpoint (chain=3); "
    "run.should_stop() saves before the limit"
)
LEAVE_OUT = "hpcinit leaves out a node that does it again; at once: +cluster.sbatch.exclude="
GONE = "a rank or its node went away without a word; the others only tell that it is gone"
FLIGHT = "torchfrtrace on flight/ in the run folder shows each rank's collectives, with the lines that called them"
HANG = "hang/ in the run folder has the stacks of all ranks; hang.action=end ends such a run by itself"


def diagnose_slurm_state(evidence: Evidence) -> Verdict | None:
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
        return diagnose_hang(evidence) if evidence.hang else _of_flight(evidence)
    if ended or evidence.state in ("TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE"):
        return _of_end(ended, evidence)
    return None


def diagnose_without_record(evidence: Evidence) -> Verdict:
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


def diagnose_hang(evidence: Evidence, record: ErrorRecord | None = None) -> Verdict:
    """record: of the rank that reported the hang, for a run whose report is lost."""
    report = evidence.hang or hang_report.of_record(record)
    stopped = report.state == heartbeats.STOPPED
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


def diagnose(evidence: Evidence) -> Verdict:
    """The first failure and its cause."""
    ordered, first = _ordered(evidence)
    signalled = _signalled(evidence.log, first)
    if signalled:
        verdict = _of_signal(signalled, evidence)
    elif first:
        verdict = _of_record(first, ordered, evidence)
    else:
        verdict = diagnose_slurm_state(evidence) or diagnose_without_record(evidence)
    return replace(_with_secondary(verdict, ordered, evidence), flight=evidence.flight)


def has_only_secondary_errors(evidence: Evidence) -> bool:
    """Whether ranks tell of an end that nobody has caused, as far as is known: a cause is written before its echoes,
    but whoever reads may have come by before it was."""
    _, first = _ordered(evidence)
    signalled = _signalled(evidence.log, first)
    told = bool(evidence.found or evidence.log.ends)
    return told and first is None and (signalled is None or signalled.how.startswith("Aborted"))


def _ordered(evidence: Evidence) -> tuple[list[Found], Found | None]:
    """All records on one clock, and the first of them that is no echo."""
    ordered = sorted(evidence.found, key=lambda one: _when(one, evidence.clocks))
    return ordered, next((one for one in ordered if _is_cause(one, evidence)), None)


def _when(one: Found, offsets: Mapping[str, float]) -> float:
    return one.record.time + offsets.get(one.record.host, 0.0)


def _is_cause(one: Found, evidence: Evidence) -> bool:
    if causes.is_secondary(one.record) or "KeyboardInterrupt" in one.record.foreign[:20]:  # Python's own name
        return False
    ended = evidence.log.cancelled
    late = ended and ended.at is not None and _when(one, evidence.clocks) >= ended.at and ended.why != "NODE FAILURE"
    return not late


def _signalled(log: JobLog, first: Found | None) -> End | None:
    """Ranks that a signal ended before anybody had told the step to end, and before srun heard of the rank `first`."""
    for end in log.ends:
        if first and first.record.rank in end.ranks:
            return None
        if not end.told and not end.how.startswith(("Exited with", "Terminated")):
            return None if end.how.startswith("Aborted") and first else end
    return None


def _of_signal(end: End, evidence: Evidence) -> Verdict:
    name = next((name for name in causes.SIGNALS if end.how.startswith(name)), "")
    kind, do = kinds.SIGNAL, causes.SIGNALS.get(name, "its last words are in that rank's log")
    rank, oom = end.ranks[0], evidence.oom
    was, plural = ("were", "s") if len(end.ranks) > 1 else ("was", "")
    how = f"{was} ended by a signal ({end.how})"
    if oom or end.how.startswith("Out Of Memory"):
        kind, do, how = (
            kinds.HOST_MEMORY,
            causes.HOST_MEMORY,
            f"{was} killed by the kernel: the node's memory for this job is used up",
        )
    lines = [f"srun's first word: task{plural} {ranges(end.ranks)}: {end.how}", oom]
    if tail := evidence.tails.get(rank):
        lines.append(f"its last words: {tail}")
    head = f"rank{plural} {ranges(end.ranks)} on {end.host} {how} first{evidence.at_step}"
    kept = tuple(line for line in lines if line)
    return Verdict(head, kind, do, rank, end.host, step=evidence.step, evidence=kept)


def _of_record(first: Found, ordered: Sequence[Found], evidence: Evidence) -> Verdict:
    record, at = first.record, _when(first, evidence.clocks)
    kind, do = causes.of_record(record)
    if kind == kinds.HANG:
        return diagnose_hang(evidence, record)
    if kind == kinds.PROGRAM and evidence.oom:
        kind, do = kinds.HOST_MEMORY, causes.HOST_MEMORY
    clock = time.strftime("%H:%M:%S", time.localtime(at))
    head = f"rank {record.rank} on {record.host} failed first, {clock}{_place(record)}: {brief(record.error)}"
    lines = _source(record.traceback)
    lines += [evidence.oom] * bool(evidence.oom)
    lines += _others(first, ordered, evidence)
    return Verdict(head, kind, do, record.rank, record.host, at, record.step, tuple(lines))


def _place(record: ErrorRecord) -> str:
    """' (saving, step 40)': the last step that was told, and the phase where it is not the training itself."""
    phase = [record.phase] if record.phase not in ("", "training") else []
    step = [f"step {record.step}"] if record.step >= 0 else []
    return f" ({', '.join(phase + step)})" if phase or step else ""


def _others(first: Found, ordered: Sequence[Found], evidence: Evidence) -> list[str]:
    """Errors beside the first that are no secondary errors, and what is known of the clocks."""
    rest = [one for one in ordered if one is not first and _is_cause(one, evidence)]
    lines = []
    same = [one.record.rank for one in rest if brief(one.record.error) == brief(first.record.error)]
    if same:
        lines.append(f"the same error on rank{'s' * (len(same) > 1)} {ranges(sorted(same))}")
    for one in [one for one in rest if one.record.rank not in same][:2]:
        later = _when(one, evidence.clocks) - _when(first, evidence.clocks)
        doubt = (
            ", which may as well have come first" if later < AGREE_S and one.record.host != first.record.host else ""
        )
        lines.append(
            f"rank {one.record.rank} on {one.record.host} {later:.1f} s later{doubt}: {brief(one.record.error)}"
        )
    return lines


def _source(traceback: str) -> list[str]:
    """The last place in the program itself: 'train.py:9 in <module>'."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith('File "')]
    theirs = [
        line for line in lines if "/site-packages/" not in line and "/hpcinit/" not in line and '"<frozen' not in line
    ]
    return [f"raised at {line.removeprefix('File ')}" for line in theirs[-1:]]


def _with_secondary(verdict: Verdict, ordered: Sequence[Found], evidence: Evidence) -> Verdict:
    """Counts of what others said because of it, by kind."""
    groups: dict[str, list[Found]] = {}
    for one in ordered:
        if one.record.rank != verdict.rank and causes.is_secondary(one.record):
            groups.setdefault(causes.secondary_name(one.record), []).append(one)
    lines = []
    for name, group in groups.items():
        times = [_when(one, evidence.clocks) for one in group]
        later = f", up to {max(times) - verdict.time:.1f} s later" if verdict.time is not None else ""
        lines.append(f"{len(group)} other rank{'s' * (len(group) > 1)}: {name}{later}")
    counted = {verdict.rank, *(one.record.rank for group in groups.values() for one in group)}
    told = sorted({rank for end in evidence.log.ends if end.told for rank in end.ranks} - counted)
    if told:
        plural = "s" * (len(told) > 1)
        lines.append(f"{len(told)} rank{plural} ended by Slurm afterwards (rank{plural} {ranges(told)})")
    if evidence.clocks:
        ahead = min(evidence.clocks, key=lambda host: evidence.clocks[host])
        spread = max(evidence.clocks.values()) - min(evidence.clocks.values())
        lines.append(f"clocks of the nodes differ by {spread:.1f} s ({ahead} is ahead); times above are corrected")
    return replace(verdict, secondary=tuple(lines))
