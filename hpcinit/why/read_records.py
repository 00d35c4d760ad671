"""Finds the error that caused a failure, from the error records of ranks and the logs of other launchers."""

from __future__ import annotations

import collections
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hpcinit.base import failure_kinds
from hpcinit.base.text import brief, rank_names
from hpcinit.records import causes, hang_report, program_use
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.why.evidence import AGREE_S, LAUNCHER, Evidence, Verdict, named
from hpcinit.why.ranking import Finding, Grade, is_of_others, is_own

OF_OTHERS = (failure_kinds.HANG, failure_kinds.START_UP, failure_kinds.MISMATCH)  # another rank causes these errors
# Failures of torch's store: on the rank that runs its server, and on the ranks that connect to it
SERVER_FAILED = re.compile(r"server socket has failed to (?:listen|bind)|EADDRINUSE")
CLIENT_FAILED = re.compile(r"client socket has (?:timed out|failed to connect)")
IS_RUNNING = re.compile(r"\b[Rr]ank (\d{1,6}) is running collective")
MOST_MORE = 4  # further lines of an error's message
# How many findings of each grade list the errors of other ranks. With 16,000 errors, each would list 15,999.
MOST_DETAILED = 8
MAY_CONTINUE = re.compile(
    r"(?i)\b(?:warn(?:ing)?(?! +(?:Evicted|OOM|SystemOOM))|info|debug|retry|retrying|skip\w*)\b"
)  # in a message that may be harmless
AFTERWARDS = "check that the result is complete; the launcher's error does not affect it"
INTERRUPTED = "Ctrl-C or scancel --signal=INT sends SIGINT to all ranks"


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield the errors that no other rank's failure caused, in the order of time.

    The interruption of a rank (KeyboardInterrupt) is yielded last.
    """
    ordered = evidence.ordered
    if evidence.over and ordered and all(one.record.rank == LAUNCHER for one in ordered):
        last = ordered[0].record
        head = f"the training finished; afterwards {who(last)} failed: {causes.short(last.error)}"
        yield Finding(Grade.RAISED, evidence.verdict(head, failure_kinds.NONE, AFTERWARDS))
    errors = [one for one in ordered if is_cause(one, evidence)]
    if any(SERVER_FAILED.search(one.record.foreign) for one in errors):
        errors = [one for one in errors if not CLIENT_FAILED.search(one.record.foreign)]
    errors = errors if evidence.has_clock else _own_first(errors)
    odd = _differs_from_all(errors)
    same: dict[str, list[int]] = {}
    for one in errors:
        same.setdefault(brief(one.record.error), []).append(one.record.rank)
    grades: collections.Counter[Grade] = collections.Counter()
    for one in errors:
        if one.record.kind != failure_kinds.HANG:
            found = _of_record(one, odd, evidence)
            grades[found.grade] += 1
            detailed = grades[found.grade] <= MOST_DETAILED
            yield _with_others(found, one, errors, same, evidence) if detailed else found
    yield from _of_alarms(evidence)
    interrupted = [one for one in ordered if is_interrupt(one.record)]
    if interrupted and len(interrupted) == len(ordered) > 1:
        head = f"{named(one.record.rank for one in interrupted)} were interrupted (SIGINT){evidence.at_step}"
        yield Finding(Grade.INTERRUPTED, evidence.verdict(head, failure_kinds.CANCELLED, INTERRUPTED))
    elif interrupted:
        record, at = interrupted[0].record, evidence.when(interrupted[0])
        head = f"{who(record)} was interrupted by SIGINT first{_clock(at, evidence)}{_place(record)}"
        when = at if evidence.has_clock else None
        rank = record.rank if record.rank >= 0 else None
        advice = causes.SIGNALS["Interrupt"]
        verdict = Verdict(head, failure_kinds.SIGNAL, advice, rank, record.host, when, record.step)
        yield Finding(Grade.INTERRUPTED, verdict, (record.rank,), inferred=not evidence.has_clock)


def _own_first(errors: Sequence[Found]) -> list[Found]:
    """Move the errors that another rank's own error can have caused to the end.

    In logs, the order of two ranks' lines does not show which rank failed first, because each rank buffers its output.
    """
    kinds = {id(one): causes.kind(one.record.foreign)[0] for one in errors}
    own = {one.record.rank for one in errors if is_own(one.record.foreign, kinds[id(one)])}
    return sorted(
        errors,
        key=lambda one: bool(own - {one.record.rank}) and is_of_others(one.record.foreign, kinds[id(one)]),
    )


def _of_alarms(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding on the first line outside of tracebacks that contains a message from records/causes.py."""
    if evidence.finished and not any(not end.succeeded for end in evidence.log.ends):
        return  # a program may print such a line after it has finished
    errors = "\n".join(one.record.error for one in evidence.found)
    for rank, text in evidence.alarms:
        found = causes.message(text)
        if not found or causes.is_secondary_text(text) or MAY_CONTINUE.search(text):
            continue
        if text in errors:  # a line of an error that is already reported
            continue
        row, named_ranks = found
        ends = [end for end in evidence.log.ends if not (end.after_abort or end.succeeded or end.how == "Aborted")]
        failed = {one for end in ends for one in end.ranks}
        own = {rank} if rank >= 0 else failed if len(failed) == 1 else set()
        ranks = named_ranks or tuple(own if row.kind not in OF_OTHERS else ())
        head = f"{evidence.named(ranks) if ranks else 'a message shows a failure'}: {brief(text)}"
        known = ranks[0] if ranks else None
        grade = Grade.STATED if named_ranks and row.kind in OF_OTHERS else Grade.NOTED
        verdict = evidence.verdict(head, row.kind, row.advice, rank=known, error=brief(text))
        yield Finding(grade, verdict, ranks, message=text)
        return


def is_cause(one: Found, evidence: Evidence) -> bool:
    """Return whether an error may be the first cause.

    Return False if another rank's failure or the end of the job caused it.
    """
    if causes.is_secondary(one.record) or is_interrupt(one.record):
        return False
    ended = evidence.log.cancelled
    late = ended and ended.at is not None and evidence.when(one) >= ended.at and ended.why != "NODE FAILURE"
    return not (late and evidence.has_clock)


def is_interrupt(record: ErrorRecord) -> bool:
    return "KeyboardInterrupt" in record.foreign[:20]  # Python's exception


def _differs_from_all(errors: Sequence[Found]) -> tuple[int, ...]:
    """Return the rank that called a different collective than all others, or () if that is unknown.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL, each message of torch compares two ranks. If there are several such pairs, the
    rank must be in all of them.
    """
    pairs = {frozenset(IS_RUNNING.findall(one.record.foreign)) for one in errors}
    pairs.discard(frozenset())
    common = set.intersection(*map(set, pairs)) if len(pairs) > 1 else ()
    return tuple(map(int, common)) if len(common) == 1 else ()


def _of_record(first: Found, odd: tuple[int, ...], evidence: Evidence) -> Finding:
    """Return the finding on an error.

    odd: the rank that called a different collective than all others, or ().
    """
    record, at = first.record, evidence.when(first)
    kind, do = causes.of_record(record)
    if kind == failure_kinds.PROGRAM and evidence.oom:
        kind, do = failure_kinds.HOST_MEMORY, causes.HOST_MEMORY
    if kind == failure_kinds.CUDA_MEMORY and evidence.uses != program_use.WRAP:
        do = causes.CUDA_MEMORY_OF_PROGRAM
    said = causes.message(record.foreign)
    at_fault = said[1] if said else ()
    text = causes.short(record.error)
    lines = [brief(line) for line in record.error.splitlines()[1:] if brief(line) and brief(line) not in text][
        :MOST_MORE
    ]
    lines += _source(record.traceback) + [evidence.oom] * bool(evidence.oom)
    at_fault = at_fault or (odd if kind == failure_kinds.MISMATCH else ())
    if said and kind in OF_OTHERS and not record.kind:
        return replace(_stated(at_fault, text, kind, do, lines, evidence), message=record.foreign)
    rank = at_fault[0] if at_fault else record.rank
    subject = who(record) if rank == record.rank else evidence.named([rank])
    head = f"{subject} failed first{_clock(at, evidence)}{_place(record)}: {text}"
    when = at if evidence.has_clock else None
    host = record.host if rank == record.rank else evidence.hosts.get(rank, "")
    known = rank if rank >= 0 else None
    verdict = Verdict(head, kind, do, known, host, when, record.step, tuple(lines), error=brief(record.error))
    return Finding(Grade.RAISED, verdict, (rank,) if rank >= 0 else (), message=record.foreign)


def _stated(
    at_fault: Sequence[int], text: str, kind: str, do: str, lines: Sequence[str], evidence: Evidence
) -> Finding:
    """Return the finding on an error whose message blames other ranks.

    at_fault: these ranks, or () if the message does not name them.
    """
    who_is = evidence.named(at_fault) + ": " if at_fault else ""
    what = {failure_kinds.HANG: "others waited for it", failure_kinds.START_UP: "a rank did not connect in time"}
    head = f"{who_is}{what.get(kind, 'the ranks called different collectives')}{evidence.at_step}: {text}"
    rank = at_fault[0] if at_fault else None
    host = evidence.hosts.get(rank, "") if rank is not None else ""
    verdict = evidence.verdict(head, kind, do, rank=rank, host=host, evidence=tuple(lines))
    return Finding(Grade.STATED if at_fault or kind != failure_kinds.HANG else Grade.HUNG, verdict, tuple(at_fault))


def who(record: ErrorRecord) -> str:
    """Return the rank with its host, such as 'rank 3 on n2'. Omit the number or the host if it is unknown."""
    subject = f"rank {record.rank}" if record.rank >= 0 else "the launcher" if record.rank == LAUNCHER else "a rank"
    return f"{subject} on {record.host}" if record.host else subject


def _clock(at: float, evidence: Evidence) -> str:
    return f", {time.strftime('%H:%M:%S', time.localtime(at))}" if evidence.has_clock else ""


def _place(record: ErrorRecord) -> str:
    """Return the phase and the last step as text, such as ' (saving, step 40)'.

    The phase 'training' is omitted. Return '' if both are unknown or omitted.
    """
    phase = [record.phase] if record.phase not in ("", "training") else []
    step = [f"step {record.step}"] if record.step >= 0 else []
    return f" ({', '.join(phase + step)})" if phase or step else ""


def _with_others(
    found: Finding, first: Found, errors: Sequence[Found], same: Mapping[str, Sequence[int]], evidence: Evidence
) -> Finding:
    """Return the finding with lines about the errors of other ranks.

    errors: the errors that may be the first cause.
    same: the ranks with the same error, by its shortened message.
    """
    text, at = brief(first.record.error), evidence.when(first)
    ranks = {*same[text]} - {first.record.rank}
    lines = [f"the same error on {rank_names(ranks)}"] if ranks else []
    rest = (one for one in errors if one is not first and one.record.rank not in ranks)
    for one in itertools.islice(rest, 2):
        delay = f"{evidence.when(one) - at:.1f} s later" if evidence.has_clock else "later"
        lines.append(f"{who(one.record)} {delay}: {brief(one.record.error)}")
    together = [
        one.record.rank
        for one in (errors if evidence.has_clock and found.grade is Grade.RAISED else ())
        if one.record.host != first.record.host
        and evidence.when(one) - at < AGREE_S
        and brief(one.record.error) != text
    ]
    verdict = replace(found.verdict, evidence=(*found.verdict.evidence, *lines))
    return replace(found, verdict=verdict, together=evidence.named(together) if together else "")


def _source(traceback: str) -> list[str]:
    """Return the innermost place in the user's program: 'train.py:9 in <module>'."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip().startswith('File "')]
    files = {line: line.partition('"')[2].partition('"')[0] for line in lines}
    program = [line for line in lines if hang_report.is_user_code(files[line])]
    return [f"raised at {line.removeprefix('File ')}" for line in program[-1:]]
