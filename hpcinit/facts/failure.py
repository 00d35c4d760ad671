"""From all that a run has left to the one failure that came first. Pure: evidence in, a verdict out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcinit.facts import causes, endings
from hpcinit.facts import failure_kinds as kinds
from hpcinit.facts.error_records import ErrorRecord, Found
from hpcinit.facts.evidence import AGREE_S, Evidence, Verdict
from hpcinit.facts.job_log import End, JobLog
from hpcinit.facts.ranges import brief, ranges


def judge(evidence: Evidence) -> Verdict:
    """The first failure and its cause."""
    ordered, first = _ordered(evidence)
    signalled = _signalled(evidence.log, first)
    if signalled:
        verdict = _of_signal(signalled, evidence)
    elif first:
        verdict = _of_record(first, ordered, evidence)
    else:
        verdict = endings.of_slurm(evidence) or endings.without_record(evidence)
    return replace(_with_echoes(verdict, ordered, evidence), flight=evidence.flight)


def has_only_echoes(evidence: Evidence) -> bool:
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
        return endings.of_hang(evidence, record)
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
    """Errors beside the first that are no echoes, and what is known of the clocks."""
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


def _with_echoes(verdict: Verdict, ordered: Sequence[Found], evidence: Evidence) -> Verdict:
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
    return replace(verdict, echoes=tuple(lines))
