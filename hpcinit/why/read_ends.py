"""Finds how ranks ended, from the lists that srun and other launchers print, and which ranks have no error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hpcinit.base import failure_kinds
from hpcinit.base.text import brief, ranges
from hpcinit.records import causes, hang_report, job_log
from hpcinit.records.hang_report import Waiting
from hpcinit.records.job_log import End
from hpcinit.why import read_hang, read_records
from hpcinit.why.evidence import Evidence, Verdict, named
from hpcinit.why.ranking import Finding, Grade

GONE = "a rank or its node disappeared without an error; the other ranks only report a lost connection"
EARLY = (
    "find out why only this rank ended: an early return, sys.exit(0), os._exit(0), or one call fewer than the others; "
    "compare what the ranks do after that step"
)
UNSEEN = (
    "no stack shows where that rank was. Ranks write stacks hang.after_s seconds after the last step: set hang.after_s "
    "below the timeout of collectives (comm.collective_timeout_s, or the program's own)"
)
_INFINIBAND = re.compile(r"from peer \S+ with (?:status=|error )\d+")  # NCCL's net_ib.cc
_PEER = re.compile(r"(?i)\b(?:from|to|with|peer|remote) (?:peer )?rank \[?(\d{1,6})")
SHELL = 128  # a shell exits with this number plus the signal's number
NOT_STARTED = (125, 126, 127)  # exit statuses of a container runtime or a shell that cannot start the program
READ_LOGS = "read the job's log, and the logs of ranks without an error record"


def findings(evidence: Evidence) -> Iterator[Finding]:
    """Yield findings on ranks that ended without an error record that explains it."""
    yield from _signals(evidence)
    yield from _sigterm(evidence)
    yield from _exits(evidence)
    yield from _early(evidence)
    calls = _calls(evidence)
    if odd := hang_report.different_call(calls):
        verdict = read_hang.of_odd_call(odd, tuple(calls), evidence)
        yield Finding(Grade.DIFFERENT, verdict, odd.ranks, inferred=not evidence.has_clock)
    yield from _unlisted(evidence)
    if evidence.unregistered:
        head = f"{evidence.named(evidence.unregistered)} did not start, and the other ranks waited for them"
        do = "start as many processes as the program expects: one per GPU, with srun on all nodes"
        verdict = _of_ranks(head, failure_kinds.START_UP, do, evidence.unregistered, evidence)
        yield Finding(Grade.HUNG, verdict, evidence.unregistered, inferred=True)
    yield from _missing(evidence, calls)


def first_signal(evidence: Evidence) -> End | None:
    """Return the end of the first rank that a signal killed. Ignore SIGTERM, and signals after Slurm aborted the step.

    Return None if no rank was killed by a signal, or if the launcher lists a rank with an error before it.
    """
    cause = next((one for one in evidence.ordered if read_records.is_cause(one, evidence)), None)
    for end in evidence.log.ends:
        if cause and (cause.record.rank in end.ranks or not end.ranks):
            return None
        if not end.after_abort and not end.how.startswith(("Exited with", "Terminated")):
            return end
    return None


def _signals(evidence: Evidence) -> Iterator[Finding]:
    if end := first_signal(evidence):
        aborted = {rank for one in evidence.log.ends if one.how.startswith("Aborted") for rank in one.ranks}
        if end.how.startswith("Aborted") and len(aborted) > 1:  # which rank aborted first is unknown
            end = replace(end, ranks=())
        abort = end.how.startswith("Aborted")  # a log may lack the message with the reason for the abort
        inferred = abort and not evidence.has_clock
        yield Finding(Grade.KILLED, _of_signal(end, evidence), end.ranks, abort, inferred=inferred)


def _sigterm(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding on ranks that were ended by SIGTERM before Slurm ended the step."""
    recorded = {one.record.rank for one in evidence.found}
    for end in evidence.log.ends:
        if not (end.succeeded or end.how.startswith("Terminated")):
            return  # the launcher ends the others after the first failure
        known = bool(end.ranks) and recorded.issuperset(end.ranks)
        if not end.after_abort and end.how.startswith("Terminated") and not known:
            yield Finding(Grade.TERMINATED, _of_signal(end, evidence), end.ranks, inferred=not evidence.has_clock)


def _of_signal(end: End, evidence: Evidence) -> Verdict:
    name = next((name for name in causes.SIGNALS if end.how.startswith(name)), "")
    kind, do = failure_kinds.SIGNAL, causes.SIGNALS.get(name, "read the end of that rank's log")
    rank, oom = (end.ranks[0] if end.ranks else None), evidence.oom
    was, plural = ("were", "s") if len(end.ranks) > 1 else ("was", "")
    how = f"{was} killed by a signal ({end.how})"
    if oom or end.how.startswith("Out Of Memory"):
        kind, do = failure_kinds.HOST_MEMORY, causes.HOST_MEMORY
        how = f"{was} killed by the kernel (the node {causes.OUT_OF_MEMORY})"
    report = "srun's report" if end.after_abort else "srun's first report"
    lines = [f"{report}: task{plural} {ranges(end.ranks)}: {end.how}" if end.host else "", oom]
    if rank is not None and (tail := evidence.tails.get(rank)):
        lines.append(f"its last output: {tail}")
    host = end.host or evidence.hosts.get(-1 if rank is None else rank, "")
    unnamed = f"a rank on {host}" if host else "a rank"
    who = replace(evidence, hosts=dict.fromkeys(end.ranks, host)).named(end.ranks) if end.ranks else unnamed
    head = f"{who} {how} first{evidence.at_step}"
    return evidence.verdict(head, kind, do, rank=rank, host=host, evidence=tuple(line for line in lines if line))


def _exits(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding on the first rank that exited with a status other than 0 and has no error record."""
    recorded = {one.record.rank for one in evidence.found}
    ends = [(end, rank) for end in evidence.log.ends for rank in end.ranks or (-1,) if rank not in recorded]
    bad = [(end, rank) for end, rank in ends if end.how.startswith("Exited with") and not end.succeeded]
    first = [(end, rank) for end, rank in bad if not causes.is_secondary_text(evidence.tails.get(rank, ""))]
    if not bad or (not first and (evidence.found or _ended_early(evidence))):
        return
    end, rank = (first or bad)[0]
    tail = evidence.tails.get(rank, "")
    kind, do = causes.kind(tail)
    who = replace(evidence, hosts={rank: end.host}).named([rank]) if rank >= 0 else "a rank"
    head = f"{who} failed first{evidence.at_step}: {end.how.lower()}" + (f": {brief(tail)}" if tail else "")
    together = sorted({one for each, one in first or bad})
    # srun lists several ranks in one line, and not in the order in which they ended.
    listed = any(len(each.ranks) > 1 for each, _ in first or bad)
    if len(together) > 1 and listed and len({each.how for each, _ in first or bad}) == 1:
        head, rank = f"the first cause is unknown: {named(together)} ended with the same status: {end.how.lower()}", -1
        kind = failure_kinds.UNKNOWN if kind == failure_kinds.PROGRAM else kind
    do = do if kind != failure_kinds.PROGRAM else "read the end of that rank's log"
    code = int((re.findall(r"\d{1,3}", end.how) or ["1"])[0])
    signal = job_log.how(SHELL - code) if code > SHELL else ""  # a shell and a container add SHELL to the signal
    if kind == failure_kinds.PROGRAM and signal in causes.SIGNALS:
        kind, do, head = failure_kinds.SIGNAL, causes.SIGNALS[signal], f"{head} (signal: {signal})"
    if kind == failure_kinds.PROGRAM and code in NOT_STARTED:
        kind, do = failure_kinds.SCRIPT, "the program did not start: the shell or the container runtime printed why"
    known, error = rank if rank >= 0 else None, brief(tail) or end.how
    verdict = evidence.verdict(head, kind, do, rank=known, host=end.host, error=error)
    yield Finding(Grade.EXITED, verdict, (rank,), inferred=not evidence.has_clock and not causes.message(tail))


def _ended_early(evidence: Evidence) -> tuple[int, ...]:
    """Return the ranks that ended with status 0 while others failed with secondary errors."""
    known = _succeeded(evidence)
    # srun lists the ranks that failed. So the other ranks ended with status 0, unless they hang or their node is
    # unreachable.
    listed = evidence.every_end_is_logged and not evidence.watched
    if listed and evidence.log.ends and evidence.state == "FAILED":
        logged = {rank for end in evidence.log.ends for rank in end.ranks}
        known |= set(range(evidence.size)) - logged
    ranks = tuple(sorted(known - {one.record.rank for one in evidence.found}))
    return ranks if 2 * len(ranks) < evidence.size else ()


def _succeeded(evidence: Evidence) -> set[int]:
    return {rank for end in evidence.log.ends if end.succeeded for rank in end.ranks} | evidence.returned


def _early(evidence: Evidence) -> Iterator[Finding]:
    ranks = _ended_early(evidence)
    if not ranks:
        return
    head = f"{evidence.named(ranks)} ended first, with exit status 0{evidence.at_step}"
    waiting = tuple(f"{call} when {'they' if len(ranks) > 1 else 'it'} ended" for call in _calls(evidence))
    verdict = _of_ranks(head, failure_kinds.EARLY_END, EARLY, ranks, evidence)
    lines = (*waiting, *read_hang.in_dumps(evidence))
    shown = _succeeded(evidence).issuperset(ranks)
    inferred = not (shown or evidence.has_clock)
    yield Finding(Grade.EARLY, replace(verdict, evidence=lines), ranks, shown=shown, inferred=inferred)


def _unlisted(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding if all listed ranks failed because of a rank that the list does not contain."""
    timed_out = any(causes.is_timeout(one.record) for one in evidence.found)
    if evidence.lists_failed_ranks and evidence.found and not _without_error(evidence) and not timed_out:
        lost = named(one.record.rank for one in evidence.found)
        head = f"a rank that is not among the failed ones ended first, with exit status 0; {lost} lost the connection"
        yield Finding(Grade.UNLISTED, evidence.verdict(head, failure_kinds.EARLY_END, EARLY))


def _missing(evidence: Evidence, calls: list[Waiting]) -> Iterator[Finding]:
    """Yield findings on ranks that the others lost or waited for."""
    missing = _without_error(evidence)
    if missing and any(causes.is_timeout(one.record) for one in evidence.found):
        head = f"a collective timed out{evidence.at_step}, and {evidence.named(missing)} did not call it"
        lines = (*map(str, calls), *evidence.last_output(missing))
        verdict = _of_ranks(head, failure_kinds.HANG, UNSEEN, missing, evidence)
        yield Finding(Grade.MISSING, replace(verdict, evidence=lines), missing)
    texts = (one.record.foreign for one in evidence.found)
    broken = next((found for text in texts if (found := _INFINIBAND.search(text))), None)
    if broken:
        head = f"a connection over InfiniBand broke ({broken[0]}): the link or that peer's process may have failed"
        yield Finding(Grade.LOST, evidence.verdict(head, failure_kinds.NETWORK, causes.NETWORK))
    elif not missing and (peers := _peers(evidence)):
        late = any(causes.is_timeout(one.record) for one in evidence.found)
        how = "did not answer in time" if late else "disappeared without an error"
        head = f"{evidence.named(peers)} {how}: {brief(evidence.ordered[0].record.error)}"
        kind, do = (failure_kinds.HANG, UNSEEN) if late else (failure_kinds.UNKNOWN, READ_LOGS)
        yield Finding(Grade.LOST, _of_ranks(head, kind, do, peers, evidence), peers)
    elif not missing and evidence.found:
        yield Finding(Grade.LOST, evidence.verdict(GONE, failure_kinds.UNKNOWN, READ_LOGS))
    elif missing and evidence.found:
        # srun may first learn that a peer ended, and then abort the step. The peers had already lost this rank.
        killed = [end for end in evidence.log.ends if [*end.ranks] == [*missing] and end.how.startswith("Killed")]
        if killed and len(missing) == 1:
            verdict = _of_signal(killed[0], evidence)
        elif len(missing) > 1:  # a signal ended most of these ranks before they printed an error
            head = f"{GONE}; {evidence.named(missing)} printed no error"
            verdict, missing = evidence.verdict(head, failure_kinds.UNKNOWN, READ_LOGS), ()
        else:
            head = GONE.replace("a rank or its node", evidence.named(missing))
            verdict = _of_ranks(head, failure_kinds.UNKNOWN, READ_LOGS, missing, evidence)
        yield Finding(Grade.LOST, verdict, missing)


def _peers(evidence: Evidence) -> tuple[int, ...]:
    """Return the rank to which the other ranks lost their connection.

    Return () if their messages name different ranks, or if that rank has an error itself.
    """
    named_ranks = {int(rank) for one in evidence.found for rank in _PEER.findall(one.record.foreign)}
    return tuple(named_ranks - {one.record.rank for one in evidence.found}) if len(named_ranks) == 1 else ()


def _of_ranks(head: str, kind: str, do: str, ranks: tuple[int, ...], evidence: Evidence) -> Verdict:
    return evidence.verdict(head, kind, do, rank=ranks[0], host=evidence.hosts.get(ranks[0], ""))


def _calls(evidence: Evidence) -> list[Waiting]:
    """Return the collectives in which ranks failed with secondary errors, those with the most ranks first."""
    together: dict[tuple[str, str], list[int]] = {}
    for one in evidence.found:
        place = hang_report.place_of_error(one.record.traceback)
        if place.waits_in and causes.is_secondary(one.record):
            together.setdefault((place.waits_in, place.at), []).append(one.record.rank)
    found = (Waiting(tuple(sorted(ranks)), *where) for where, ranks in together.items())
    return sorted(found, key=lambda call: (-len(call.ranks), call.ranks))


def _without_error(evidence: Evidence) -> tuple[int, ...]:
    """Return the ranks without an error record, or () if they are not the minority."""
    missing = tuple(sorted(set(range(evidence.size)) - {one.record.rank for one in evidence.found}))
    return missing if 2 * len(missing) < evidence.size else ()
