"""Finds which ranks cause a hang, from flight recorder dumps, the hang report, and the stacks of a silent program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpcinit.base import failure_kinds
from hpcinit.records import causes, hang_report, heartbeats
from hpcinit.records.error_records import ErrorRecord
from hpcinit.records.hang_report import HangReport, Waiting
from hpcinit.why.evidence import Evidence, Verdict
from hpcinit.why.ranking import Finding, Grade

FLIGHT = "torchfrtrace on flight/ in the run folder shows each rank's collectives, with the lines that called them"
HANG = "read the stacks of all ranks in hang/ of the run folder; hang.action=end ends such a run automatically"
DIFFERENT = "the ranks run different code or data at this point: compare what they do before these calls"
WORKER = (
    "a DataLoader worker does not return from reading the data set or the file system; on that node, "
    "py-spy dump --pid {pid} shows the worker's line; "
)
STOPPED_BY = "another process stopped it (SIGSTOP, a debugger, a watchdog of the node); "
STUCK = (
    "read the log and the line of the rank that differs from the others; while the job runs, hpcinit stacks RUN shows "
    "where each rank is; hpcinit detects hangs, and with hang.action=end ends them, if the program calls "
    "run.progress(step, total)"
)


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield what the dumps and the stacks show about a hang."""
    report = evidence.hang or _of_record(evidence)
    culprits = evidence.flight.culprits
    waits = report is not None and not report.nobody_waits
    agree = report is not None and waits and (report.rank in {one.rank for one in culprits} or report.silent_nodes)
    if evidence.flight and not agree and not (report and not culprits):
        yield _of_flight(evidence, report)
    if report and waits:
        yield _of_report(report, evidence)
    elif evidence.silence and is_hang(evidence.silence):
        ranks = tuple(one.rank for one in evidence.silence.stuck)
        yield Finding(Grade.WAITING, of_silence(evidence, evidence.silence), ranks)
    elif report and not culprits:
        first, *rest = report.lines()
        head = f"{first}, but the stacks show no rank that waits for another"
        yield Finding(Grade.NOTHING, evidence.verdict(head, failure_kinds.UNKNOWN, HANG, evidence=tuple(rest)))


def is_hang(silence: HangReport) -> bool:
    """Return whether the stacks of a silent program show a hang.

    In a hang, some ranks wait for others, or ranks wait in different calls.
    """
    return silence.certain or bool(not silence.stuck and hang_report.different_call(silence.waiting))


def _of_record(evidence: Evidence) -> HangReport | None:
    """Return a hang report with the error of the rank that ended the run because of a hang, or None."""
    records = (one.record for one in evidence.ordered)
    first: ErrorRecord | None = next((one for one in records if one.kind == failure_kinds.HANG), None)
    if first is None:
        return None
    text = causes.detail(first.error) or first.error
    return HangReport(rank=first.rank_at_fault, host=first.host_at_fault, text=(text,))


def _of_flight(evidence: Evidence, report: HangReport | None) -> Finding:
    """Return the finding from the dumps, with the lines of the hang report if there is one."""
    first, *rest = evidence.flight.lines()
    culprits = evidence.flight.culprits
    do = f"{culprits[0].advice}; {FLIGHT}" if culprits else FLIGHT
    rank, host = (culprits[0].rank, culprits[0].host) if culprits else (None, "")
    lines = (*rest, *(report.lines() if report else ()))
    head, kind = f"a collective hung: {first}", evidence.flight.kind
    verdict = evidence.verdict(head, kind, do, rank=rank, host=host, evidence=lines)
    return Finding(Grade.PROVEN if culprits else Grade.HUNG, verdict, tuple(one.rank for one in culprits))


def _of_report(report: HangReport, evidence: Evidence) -> Finding:
    if not report.host and not evidence.flight.culprits and (odd := hang_report.different_call(report.waiting)):
        return Finding(Grade.WAITING, of_odd_call(odd, report.waiting, evidence), odd.ranks)
    worker = next((one.worker or "PID" for one in report.stuck if one.rank == report.rank and one.loader), 0)
    do = STOPPED_BY * (report.state == heartbeats.STOPPED) + WORKER.format(pid=worker) * bool(worker) + HANG
    about, rank, host, flight = report.headline, report.rank, report.host, in_dumps(evidence)
    tail = evidence.tails.get(-1 if rank is None else rank)
    rest = (
        *(line for line in report.lines() if line != about),
        *([f"its last output: {tail}"] if tail and tail not in report.lines() else []),
        *flight,
    )
    head = f"the training hung: {about}"
    verdict = evidence.verdict(head, failure_kinds.HANG, do, rank=rank, host=host, evidence=rest)
    ranks = tuple(one.rank for one in report.stuck) + tuple(rank for node in report.silent_nodes for rank in node.ranks)
    return Finding(Grade.WAITING if ranks or host else Grade.HUNG, verdict, ranks)


def of_odd_call(odd: Waiting, calls: tuple[Waiting, ...], evidence: Evidence) -> Verdict:
    """Return the verdict on the ranks in `odd`, which wait in a different call than the majority.

    calls: all calls in which ranks wait.
    """
    others = next(call for call in calls if call is not odd)
    head = f"the ranks called different collectives{evidence.at_step}: {odd}; {others}"
    host = evidence.hosts.get(odd.ranks[0], "")
    return evidence.verdict(head, failure_kinds.MISMATCH, DIFFERENT, rank=odd.ranks[0], host=host)


def of_silence(evidence: Evidence, report: HangReport, head: str = "") -> Verdict:
    """Return the verdict on a run that reports no steps and whose ranks have all stopped printing.

    head: the state of the job.
    """
    first, *rest = report.lines()
    if not report.stuck and (odd := hang_report.different_call(report.waiting)):
        verdict = of_odd_call(odd, report.waiting, evidence)
        return replace(verdict, evidence=(first, *in_dumps(evidence)))
    if report.certain:
        about = f"the ranks seem to hang: {report.stuck[0]}; {first}"
        lines = (*(line for line in rest if line != str(report.stuck[0])), *in_dumps(evidence))
        do = STOPPED_BY * (report.state == heartbeats.STOPPED) + STUCK
        return evidence.verdict(about, failure_kinds.HANG, do, rank=report.rank, host=report.host, evidence=lines)
    do = "wait if such a pause is normal for the program; else see where its ranks are now: hpcinit stacks RUN"
    if rest:
        do += ", and compare with the stacks in hang/"
    return evidence.verdict(f"{head}, but {first}", failure_kinds.NONE, do, evidence=tuple(rest))


def in_dumps(evidence: Evidence) -> list[str]:
    return [f"flight recorder: {line}" for line in evidence.flight.lines()]
