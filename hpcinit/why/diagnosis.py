"""Find the first failure in the evidence of a run. Functions take Evidence, return a Verdict, and read no file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hpcinit.base import failure_kinds
from hpcinit.base.text import brief, ranges
from hpcinit.records import causes, hang_report, heartbeats, program_use
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.hang_report import HangReport, Waiting
from hpcinit.records.job_log import Cancelled, End, JobLog
from hpcinit.why import setup_failure
from hpcinit.why.evidence import AGREE_S, LAUNCHER, Evidence, Verdict

MORE_TIME = (
    "request more time (time_min=...), or several jobs in a row that resume from the last checkpoint (chain=3); "
    "run.should_stop() saves before the limit"
)
EXCLUDE = "hpcinit excludes a node that fails again; to exclude it now: +cluster.sbatch.exclude="
GONE = "a rank or its node disappeared without an error; the other ranks only report that they lost it"
FLIGHT = "torchfrtrace on flight/ in the run folder shows each rank's collectives, with the lines that called them"
HANG = "read the stacks of all ranks in hang/ of the run folder; hang.action=end ends such a run automatically"


def diagnose_slurm_state(evidence: Evidence) -> Verdict | None:
    """Return the verdict if Slurm ended the job or reported the fault (a node, the OOM killer, a hang); else None."""
    log, ended = evidence.log, evidence.log.cancelled
    lost = log.lost or tuple(evidence.nodes if evidence.state == "NODE_FAIL" else ())
    if lost or evidence.state in ("NODE_FAIL", "BOOT_FAIL") or (ended and ended.why == "NODE FAILURE"):
        return _of_node(lost, evidence)
    if log.unreachable:
        which = ", ".join(log.unreachable)
        head = f"srun could not start the ranks on {which}: its slurmd did not answer"
        do = f"the node is down, or srun's own set-up failed there (an image, a mount); {EXCLUDE}{log.unreachable[0]}"
        return _verdict(evidence, head, failure_kinds.NODE, do, host=log.unreachable[0])
    if evidence.oom:
        head = "a node ran out of the memory of this job: the kernel killed one of its processes"
        return _verdict(evidence, head, failure_kinds.HOST_MEMORY, causes.HOST_MEMORY, evidence=(evidence.oom,))
    if evidence.hang or (evidence.flight and not evidence.silence):
        return diagnose_hang(evidence) if evidence.hang else _of_flight(evidence)
    if ended or evidence.state in ("TIMEOUT", "CANCELLED", "PREEMPTED", "DEADLINE"):
        return _of_end(ended, evidence)
    return None


def diagnose_without_record(evidence: Evidence) -> Verdict:
    """Return the verdict on a run in which no rank recorded a cause and Slurm reports none: from exit statuses, from
    ranks that are missing among the errors, from the calls in which the others waited, or from the batch script."""
    if verdict := _of_missing_cause(evidence):
        return verdict
    if evidence.found:
        do = "read the job's log, and the logs of ranks without an error record"
        missing = _without_error(evidence)
        if not missing:
            return _verdict(evidence, GONE, failure_kinds.UNKNOWN, do)
        # srun may receive the end of a peer first and abort the step. The peers lost this rank before that.
        killed = [end for end in evidence.log.ends if [*end.ranks] == [*missing] and end.how.startswith("Killed")]
        if killed and len(missing) == 1:
            return _of_signal(killed[0], evidence)
        head, rank = GONE.replace("a rank or its node", _on_host(missing, evidence)), missing[0]
        return _verdict(evidence, head, failure_kinds.UNKNOWN, do, rank=rank, host=evidence.hosts.get(rank, ""))
    if verdict := _of_script(evidence):
        return verdict
    about = f"{evidence.state} ({evidence.reason})" if evidence.reason else evidence.state
    return _verdict(
        evidence, f"the cause is unknown: Slurm's state is {about}", failure_kinds.UNKNOWN, "scontrol show job"
    )


def _of_script(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a batch script that ended before any rank left an error; None if nothing shows that."""
    if evidence.setup and evidence.setup.ended:
        return setup_failure.verdict(evidence.setup)
    output = evidence.log.output
    if output or evidence.exit_status:
        head = f"the batch script ended with exit status {evidence.exit_status} and no rank left an error"
        head += f": {output[-1]}" if output else ""
        return _verdict(
            evidence,
            head,
            failure_kinds.SCRIPT,
            _of_status(evidence.exit_status),
            evidence=output[:-1],
            error=(output or ("",))[-1],
        )
    return None


def _of_missing_cause(evidence: Evidence) -> Verdict | None:
    """Return the verdict on the rank that explains the secondary errors of the others; None if none does."""
    return (
        _of_stop_signal(evidence)
        or _of_sigterm(evidence)
        or _of_interrupt(evidence)
        or _of_exit_status(evidence)
        or _of_early_end(evidence)
        or _of_different_calls(evidence)
        or _of_unlisted_end(evidence)
        or _of_missing_call(evidence)
    )


def _of_stop_signal(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a SIGTERM to the whole job step: it ended a DataLoader worker, or a handler of the program
    exited with 143, or most ranks died of it."""
    ended = [one.record for one in evidence.found if causes.STOPPED_BY_SIGTERM.search(one.record.foreign)]
    died = {rank for end in evidence.log.ends if not end.after_abort and end.how == "Terminated" for rank in end.ranks}
    if not ended and not (evidence.size > 1 and 2 * len(died) > evidence.size):
        return None
    if evidence.preempted:
        return _of_end(Cancelled("PREEMPTION", "", None), evidence)
    lines = tuple(f"{_who(record)}: {brief(record.error)}" for record in ended[:2])
    head = f"the ranks were terminated by SIGTERM{evidence.at_step}, and its sender is unknown"
    return _verdict(evidence, head, failure_kinds.SIGNAL, STOP_SIGNAL, evidence=lines)


STOP_SIGNAL = (
    "Slurm sends it before a preemption, at the time limit and with scancel: sacct -o State,Reason shows which; "
    "run.should_stop() saves when it arrives"
)


def _of_sigterm(evidence: Evidence) -> Verdict | None:
    """Return the verdict on ranks that SIGTERM ended before Slurm ended the step."""
    recorded = {one.record.rank for one in evidence.found}
    for end in evidence.log.ends:
        known = bool(end.ranks) and recorded.issuperset(end.ranks)
        if not end.after_abort and end.how.startswith("Terminated") and not known:
            return _of_signal(end, evidence)
    return None


def _of_interrupt(evidence: Evidence) -> Verdict | None:
    """Return the verdict on the first rank with Python's KeyboardInterrupt, or on all ranks if all have one."""
    ordered, _ = _ordered(evidence)
    interrupted = [one for one in ordered if _is_interrupt(one.record)]
    if not interrupted:
        return None
    if len(interrupted) == len(ordered) > 1:
        head = f"{_named(one.record.rank for one in interrupted)} were interrupted (SIGINT){evidence.at_step}"
        return _verdict(evidence, head, failure_kinds.CANCELLED, "Ctrl-C or scancel --signal=INT sends it to all ranks")
    record, at = interrupted[0].record, _when(interrupted[0], evidence.clocks)
    clock = f", {time.strftime('%H:%M:%S', time.localtime(at))}" if evidence.has_clock else ""
    head = f"{_who(record)} was interrupted by SIGINT first{clock}{_place(record)}"
    when = at if evidence.has_clock else None
    return Verdict(head, failure_kinds.SIGNAL, causes.SIGNALS["Interrupt"], record.rank, record.host, when, record.step)


def _of_exit_status(evidence: Evidence) -> Verdict | None:
    """Return the verdict on the first rank that exited with another status than 0 and without an error record."""
    recorded = {one.record.rank for one in evidence.found}
    ends = [(end, rank) for end in evidence.log.ends for rank in end.ranks or (-1,) if rank not in recorded]
    bad = [(end, rank) for end, rank in ends if end.how.startswith("Exited with") and not end.succeeded]
    first = [(end, rank) for end, rank in bad if not causes.is_secondary_text(evidence.tails.get(rank, ""))]
    if not first and (evidence.found or _ended_early(evidence)):
        return None
    return _of_exit(*(first or bad)[0], evidence) if bad else None


EARLY = (
    "it left before the others were done: an early return, sys.exit(0) or os._exit(0) on this rank alone, or it made "
    "one call less than the others; compare what it does after that step"
)


def _ended_early(evidence: Evidence) -> tuple[int, ...]:
    """Return the ranks that ended with status 0 although others failed with secondary errors."""
    known = {rank for end in evidence.log.ends if end.succeeded for rank in end.ranks} | evidence.returned
    # srun prints nothing about a task that ended with status 0. While a node is unreachable it prints nothing either.
    if evidence.every_end_is_logged and evidence.log.ends and evidence.state == "FAILED":
        logged = {rank for end in evidence.log.ends for rank in end.ranks}
        known |= set(range(evidence.size)) - logged
    ranks = tuple(sorted(known - {one.record.rank for one in evidence.found}))
    return ranks if 2 * len(ranks) < evidence.size else ()


def _of_early_end(evidence: Evidence) -> Verdict | None:
    ranks = _ended_early(evidence)
    if not ranks:
        return None
    host = evidence.hosts.get(ranks[0], "")
    head = f"{_on_host(ranks, evidence)} ended first, with exit status 0{evidence.at_step}"
    waiting = tuple(f"{call} when {_it(ranks)} ended" for call in _calls(evidence))
    return _verdict(evidence, head, failure_kinds.EARLY_END, EARLY, rank=ranks[0], host=host, evidence=waiting)


def _of_unlisted_end(evidence: Evidence) -> Verdict | None:
    """Return the verdict on a rank that is missing in a list of those that failed; its number is unknown."""
    if not evidence.lists_failed_ranks or not evidence.found or _without_error(evidence):
        return None
    if any(causes.is_timeout(one.record) for one in evidence.found):
        return None
    lost = _named(one.record.rank for one in evidence.found)
    head = f"a rank that is not among the failed ones ended first, with exit status 0; {lost} lost it"
    return _verdict(evidence, head, failure_kinds.EARLY_END, EARLY)


def _of_different_calls(evidence: Evidence) -> Verdict | None:
    """Return the verdict on ranks that waited in another call than the majority, from the errors of the ranks."""
    odd = hang_report.different_call(_calls(evidence))
    return _of_odd_call(odd, _calls(evidence), evidence) if odd else None


DIFFERENT = "the ranks run different code or data at this point: compare what they do before these calls"


def _of_odd_call(odd: Waiting, calls: Sequence[Waiting], evidence: Evidence) -> Verdict:
    host = evidence.hosts.get(odd.ranks[0], "")
    others = next(call for call in calls if call is not odd)
    head = f"the ranks called different collectives{evidence.at_step}: {odd}; {others}"
    return _verdict(evidence, head, failure_kinds.MISMATCH, DIFFERENT, rank=odd.ranks[0], host=host)


def _of_missing_call(evidence: Evidence) -> Verdict | None:
    """Return the verdict on ranks without any error while the collective of all others timed out."""
    missing = _without_error(evidence)
    if not missing or not any(causes.is_timeout(one.record) for one in evidence.found):
        return None
    host = evidence.hosts.get(missing[0], "")
    head = f"a collective timed out{evidence.at_step}, and {_on_host(missing, evidence)} did not call it"
    lines = [str(call) for call in _calls(evidence)]
    lines += [f"the last output of rank {rank}: {evidence.tails[rank]}" for rank in missing if rank in evidence.tails]
    return _verdict(evidence, head, failure_kinds.HANG, UNSEEN, rank=missing[0], host=host, evidence=tuple(lines))


def _without_error(evidence: Evidence) -> tuple[int, ...]:
    """Return the ranks without an error record, if they are the minority."""
    missing = tuple(sorted(set(range(evidence.size)) - {one.record.rank for one in evidence.found}))
    return missing if 2 * len(missing) < evidence.size else ()


UNSEEN = (
    "where that rank was is unknown: its stack is written after hang.after_s, which must be below the timeout of "
    "collectives (comm.collective_timeout_s, or the program's own)"
)


def _calls(evidence: Evidence) -> list[Waiting]:
    """Return the collectives in which ranks failed with secondary errors, from their tracebacks, most ranks first."""
    together: dict[tuple[str, str], list[int]] = {}
    for one in evidence.found:
        place = hang_report.place_of_error(one.record.traceback)
        if place.waits_in and causes.is_secondary(one.record):
            together.setdefault((place.waits_in, place.at), []).append(one.record.rank)
    found = (Waiting(tuple(sorted(ranks)), *where) for where, ranks in together.items())
    return sorted(found, key=lambda call: (-len(call.ranks), call.ranks))


def _named(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank{'s' * (len(found) > 1)} {ranges(found)}"


def _on_host(ranks: Sequence[int], evidence: Evidence) -> str:
    hosts = {evidence.hosts.get(rank, "") for rank in ranks} - {""}
    return f"{_named(ranks)} on {', '.join(sorted(hosts))}" if hosts else _named(ranks)


def _it(ranks: Sequence[int]) -> str:
    return "they" if len(ranks) > 1 else "it"


WORKER = (
    "its data set, or the file system that it reads, does not return; on that node, py-spy dump --pid {pid} shows the "
    "line of the worker; "
)
STOPPED_BY = "another process stopped it (SIGSTOP, a debugger, a watchdog of the node); "


def diagnose_hang(evidence: Evidence, record: ErrorRecord | None = None) -> Verdict:
    """Return the verdict on a hang. record: of the rank that reported it, used if the report itself is lost."""
    report = evidence.hang or hang_report.of_record(record)
    if not report.host and (odd := hang_report.different_call(report.waiting)):
        return _of_odd_call(odd, report.waiting, evidence)
    worker = next((one.worker or "PID" for one in report.stuck if one.rank == report.rank and one.loader), 0)
    do = STOPPED_BY * (report.state == heartbeats.STOPPED) + WORKER.format(pid=worker) * bool(worker) + HANG
    about, rank, host, flight = report.headline, report.rank, report.host, found_in(evidence)
    if not host and evidence.flight.culprits:  # all ranks wait in collectives: only the dumps show which are different
        culprit = evidence.flight.culprits[0]
        about, rank, host, flight = evidence.flight.lines()[0], culprit.rank, culprit.host, flight[1:]
    tail = evidence.tails.get(-1 if rank is None else rank)
    rest = (
        *(line for line in report.lines() if line != about),
        *([f"its last output: {tail}"] if tail and tail not in report.lines() else []),
        *flight,
    )
    head = f"the training hung: {about}"
    return _verdict(evidence, head, failure_kinds.HANG, do, rank=rank, host=host, evidence=rest)


STUCK = (
    "read the log and the line of the rank that differs from the others; while the job runs, hpcinit stacks RUN shows "
    "where each rank is; hpcinit detects hangs, and with hang.action=end ends them, if the program calls "
    "run.progress(step, total)"
)


def diagnose_silence(evidence: Evidence, report: HangReport, head: str) -> Verdict:
    """Return the verdict on a run whose program reports no steps while no rank prints. head: the state of its job."""
    first, *rest = report.lines()
    if report.certain:
        about = f"the ranks seem to hang: {report.stuck[0]}; {first}"
        lines = (*(line for line in rest if line != str(report.stuck[0])), *found_in(evidence))
        do = STOPPED_BY * (report.state == heartbeats.STOPPED) + STUCK
        return _verdict(evidence, about, failure_kinds.HANG, do, rank=report.rank, host=report.host, evidence=lines)
    do = "wait if such a pause is normal for the program; else see where its ranks are now: hpcinit stacks RUN"
    if rest:
        do += ", and compare with the stacks in hang/"
    return _verdict(evidence, f"{head}, but {first}", failure_kinds.NONE, do, evidence=tuple(rest))


def _of_flight(evidence: Evidence) -> Verdict:
    """Return the verdict on a collective that timed out, from the dumps of torch's flight recorder."""
    first, *rest = evidence.flight.lines()
    culprit = next(iter(evidence.flight.culprits), None)
    if culprit and culprit.rank in evidence.returned and (early := _of_early_end(evidence)):
        return replace(early, evidence=(*early.evidence, *found_in(evidence)))
    do = f"{culprit.advice}; {FLIGHT}" if culprit else FLIGHT
    rank, host = (culprit.rank, culprit.host) if culprit else (None, "")
    return _verdict(
        evidence, f"a collective hung: {first}", failure_kinds.HANG, do, rank=rank, host=host, evidence=tuple(rest)
    )


def found_in(evidence: Evidence) -> list[str]:
    return [f"flight recorder: {line}" for line in evidence.flight.lines()]


def _verdict(found: Evidence, headline: str, kind: str, do: str, **more: object) -> Verdict:
    return Verdict(headline, kind, do, step=found.step, **more)  # type: ignore[arg-type]


def _of_node(lost: Sequence[str], found: Evidence) -> Verdict:
    which = ",".join(lost) or "NODE"
    lines = tuple(f"{name}: {found.nodes[name]}" for name in lost if found.nodes.get(name))
    do = f"submit again without that node: +cluster.sbatch.exclude={which}; report the node to the site"
    head = f"node {', '.join(lost)} was lost" if lost else "a node was lost"
    head += f"{found.at_step}: Slurm reports a node failure"
    return _verdict(found, head, failure_kinds.NODE, do, host=lost[0] if lost else "", evidence=lines, resubmit=True)


def _of_end(ended: Cancelled | None, found: Evidence) -> Verdict:
    why = {"TIMEOUT": "TIME LIMIT", "PREEMPTED": "PREEMPTION"}.get(found.state, "") or (ended.why if ended else "")
    at = ended.at if ended else None
    when = (f", {time.strftime('%H:%M:%S', time.localtime(at))}" if at else "") + found.at_step
    if "TIME LIMIT" in why:
        limit = f" of {found.time_min} min" if found.time_min else ""
        if found.silence:
            return _of_silent_end(found.silence, f"the time limit{limit} ended the job{when}", found)
        return _verdict(
            found, f"the time limit{limit} ended the job{when}", failure_kinds.TIME_LIMIT, MORE_TIME, time=at
        )
    if "REQUEUE" in why:
        head = f"the job was requeued{when} by its batch script, an administrator, or scontrol requeue"
        return _verdict(found, head, failure_kinds.REQUEUED, "nothing to fix: no part of the run failed", time=at)
    if "PREEMPT" in why:
        do = "submit it again; run.should_stop() saves when Slurm sends its warning"
        head = f"a job of higher priority took the nodes{when}"
        return _verdict(found, head, failure_kinds.PREEMPTED, do, time=at, resubmit=True)
    who = f" by {found.who}" if found.who else ""
    head = f"the job was canceled{who}{when} (scancel, hpcinit cancel, or an administrator)"
    return _verdict(found, head, failure_kinds.CANCELLED, "nothing to fix: no part of the run failed", time=at)


def _of_silent_end(report: HangReport, head: str, found: Evidence) -> Verdict:
    """Return the verdict on a job that reached its time limit while no rank printed anything."""
    verdict = diagnose_silence(found, report, head)
    if report.certain:
        return replace(verdict, headline=f"{head}; {verdict.headline}")
    do = f"if the ranks did not hang (hang/ has their stacks): {MORE_TIME}"
    return replace(verdict, kind=failure_kinds.TIME_LIMIT, do=do)


def _of_exit(end: End, rank: int, found: Evidence) -> Verdict:
    tail = found.tails.get(rank, "")
    kind, do = causes.kind(tail)
    who = _on_host([rank], replace(found, hosts={rank: end.host})) if rank >= 0 else "a rank"
    head = f"{who} failed first{found.at_step}: {end.how.lower()}"
    head += f": {brief(tail)}" if tail else ""
    do = do if kind != failure_kinds.PROGRAM else "its log has its last output"
    error = brief(tail) or end.how
    return _verdict(found, head, kind, do, rank=rank if rank >= 0 else None, host=end.host, error=error)


def _of_status(status: int | None) -> str:
    if status == 127:
        return "a command was not found: check cluster.modules, cluster.setup, cluster.venv"
    return "read the lines above it in the job's log: modules, cluster.setup, srun"


def diagnose(evidence: Evidence) -> Verdict:
    """Return the first failure and its cause."""
    ordered, first = _ordered(evidence)
    signalled = _signalled(evidence.log, first)
    if signalled:
        verdict = _of_signal(signalled, evidence)
    elif first:
        verdict = _of_record(first, ordered, evidence)
    else:
        verdict = diagnose_slurm_state(evidence) or diagnose_without_record(evidence)
    if verdict.kind == failure_kinds.CUDA_MEMORY and evidence.uses != program_use.WRAP:
        verdict = replace(verdict, do=causes.CUDA_MEMORY_OF_PROGRAM)
    if evidence.setup and not evidence.setup.ended:
        line = f"before the ranks started, a line of the setup failed: {setup_failure.described(evidence.setup)}"
        verdict = replace(verdict, evidence=(*verdict.evidence, line))
    return replace(_with_secondary(verdict, ordered, evidence), flight=evidence.flight)


def has_only_secondary_errors(evidence: Evidence) -> bool:
    """Return whether all errors of ranks are secondary, so that the first one is missing.

    The rank that fails first writes its record first, but a reader on another machine may not see that file yet.
    """
    _, first = _ordered(evidence)
    signalled = _signalled(evidence.log, first)
    any_error = bool(evidence.found or evidence.log.ends)
    return any_error and first is None and (signalled is None or signalled.how.startswith("Aborted"))


def _ordered(evidence: Evidence) -> tuple[list[Found], Found | None]:
    """Return all records in the order of one common clock, and the first that is not a secondary error."""
    ordered = sorted(evidence.found, key=lambda one: _when(one, evidence.clocks))
    return ordered, next((one for one in ordered if _is_cause(one, evidence)), None)


def _when(one: Found, offsets: Mapping[str, float]) -> float:
    return one.record.time + offsets.get(one.record.host, 0.0)


def _is_cause(one: Found, evidence: Evidence) -> bool:
    if causes.is_secondary(one.record) or _is_interrupt(one.record):
        return False
    ended = evidence.log.cancelled
    late = ended and ended.at is not None and _when(one, evidence.clocks) >= ended.at and ended.why != "NODE FAILURE"
    return not late


def _is_interrupt(record: ErrorRecord) -> bool:
    return "KeyboardInterrupt" in record.foreign[:20]  # Python's exception


def _signalled(log: JobLog, first: Found | None) -> End | None:
    """Return the ranks that a signal killed before the step was aborted and before srun reported the rank `first`."""
    for end in log.ends:
        if first and first.record.rank in end.ranks:
            return None
        if not end.after_abort and not end.how.startswith(("Exited with", "Terminated")):
            return None if end.how.startswith("Aborted") and first else end
    return None


def _of_signal(end: End, evidence: Evidence) -> Verdict:
    name = next((name for name in causes.SIGNALS if end.how.startswith(name)), "")
    kind, do = failure_kinds.SIGNAL, causes.SIGNALS.get(name, "read the end of that rank's log")
    rank, oom = (end.ranks[0] if end.ranks else None), evidence.oom
    was, plural = ("were", "s") if len(end.ranks) > 1 else ("was", "")
    how = f"{was} killed by a signal ({end.how})"
    if oom or end.how.startswith("Out Of Memory"):
        kind, do, how = (
            failure_kinds.HOST_MEMORY,
            causes.HOST_MEMORY,
            f"{was} killed by the kernel (the node ran out of the memory of this job)",
        )
    report = "srun's report" if end.after_abort else "srun's first report"
    lines = [f"{report}: task{plural} {ranges(end.ranks)}: {end.how}" if end.host else "", oom]
    if rank is not None and (tail := evidence.tails.get(rank)):
        lines.append(f"its last output: {tail}")
    host = end.host or evidence.hosts.get(-1 if rank is None else rank, "")
    who = _on_host(end.ranks, replace(evidence, hosts=dict.fromkeys(end.ranks, host))) if end.ranks else "a rank"
    head = f"{who} {how} first{evidence.at_step}"
    kept = tuple(line for line in lines if line)
    return Verdict(head, kind, do, rank, host, step=evidence.step, evidence=kept)


def _of_record(first: Found, ordered: Sequence[Found], evidence: Evidence) -> Verdict:
    record, at = first.record, _when(first, evidence.clocks)
    kind, do = causes.of_record(record)
    if kind == failure_kinds.HANG:
        return diagnose_hang(evidence, record)
    if kind == failure_kinds.PROGRAM and evidence.oom:
        kind, do = failure_kinds.HOST_MEMORY, causes.HOST_MEMORY
    clock = f", {time.strftime('%H:%M:%S', time.localtime(at))}" if evidence.has_clock else ""
    head = f"{_who(record)} failed first{clock}{_place(record)}: {brief(record.error)}"
    lines = _source(record.traceback)
    lines += [evidence.oom] * bool(evidence.oom)
    lines += _others(first, ordered, evidence)
    rank, when = (record.rank if record.rank >= 0 else None), (at if evidence.has_clock else None)
    return Verdict(head, kind, do, rank, record.host, when, record.step, tuple(lines), error=brief(record.error))


def _who(record: ErrorRecord) -> str:
    """Return 'rank 3 on n2'. A log that hpcinit did not write may show neither."""
    who = f"rank {record.rank}" if record.rank >= 0 else "the launcher" if record.rank == LAUNCHER else "a rank"
    return f"{who} on {record.host}" if record.host else who


def _place(record: ErrorRecord) -> str:
    """Return ' (saving, step 40)': the last reported step, and the phase unless that is training."""
    phase = [record.phase] if record.phase not in ("", "training") else []
    step = [f"step {record.step}"] if record.step >= 0 else []
    return f" ({', '.join(phase + step)})" if phase or step else ""


def _others(first: Found, ordered: Sequence[Found], evidence: Evidence) -> list[str]:
    """Return lines about the other errors that are not secondary, with their delay after the first."""
    rest = [one for one in ordered if one is not first and _is_cause(one, evidence)]
    lines = []
    same = [one.record.rank for one in rest if brief(one.record.error) == brief(first.record.error)]
    if same:
        lines.append(f"the same error on rank{'s' * (len(same) > 1)} {ranges(sorted(same))}")
    for one in [one for one in rest if one.record.rank not in same][:2]:
        later = _when(one, evidence.clocks) - _when(first, evidence.clocks)
        doubt = ", which may have failed first" if later < AGREE_S and one.record.host != first.record.host else ""
        delay = f"{later:.1f} s later{doubt}" if evidence.has_clock else "later"
        lines.append(f"{_who(one.record)} {delay}: {brief(one.record.error)}")
    return lines


def _source(traceback: str) -> list[str]:
    """Return the innermost place in the user's program: 'train.py:9 in <module>'."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith('File "')]
    files = {line: line.partition('"')[2].partition('"')[0] for line in lines}
    program = [line for line in lines if hang_report.is_user_code(files[line])]
    return [f"raised at {line.removeprefix('File ')}" for line in program[-1:]]


def _with_secondary(verdict: Verdict, ordered: Sequence[Found], evidence: Evidence) -> Verdict:
    """Add to the verdict how many other ranks failed because of it, by kind of error."""
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
    aborted = sorted({rank for end in evidence.log.ends if end.after_abort for rank in end.ranks} - counted)
    if aborted:
        plural = "s" * (len(aborted) > 1)
        lines.append(f"{len(aborted)} rank{plural} ended by Slurm afterwards (rank{plural} {ranges(aborted)})")
    if evidence.clocks:
        ahead = min(evidence.clocks, key=lambda host: evidence.clocks[host])
        spread = max(evidence.clocks.values()) - min(evidence.clocks.values())
        lines.append(f"clocks of the nodes differ by {spread:.1f} s ({ahead} is ahead); times above are corrected")
    return replace(verdict, secondary=tuple(lines))
