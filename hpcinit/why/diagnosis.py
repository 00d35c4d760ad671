"""Finds the first failure of a run: collects the findings of each source of evidence, and ranks them.

Each source of evidence has a module read_*.py, which yields findings. ranking.py decides which finding is the first
failure. gather_evidence.py has already read all files.
"""

from __future__ import annotations

from dataclasses import replace

from hpcinit.base.text import counted, ranges
from hpcinit.records import causes
from hpcinit.records.error_records import Found
from hpcinit.why import (
    ranking,
    read_ends,
    read_hang,
    read_records,
    read_slurm,
    read_watchdog,
    setup_failure,
)
from hpcinit.why.evidence import Evidence, Verdict
from hpcinit.why.ranking import Finding

READERS = (
    read_hang.findings,
    read_watchdog.findings,
    read_records.findings,
    read_ends.findings,
    read_slurm.findings,
)
diagnose_silence = read_hang.of_silence


def findings(evidence: Evidence) -> list[Finding]:
    """Return the findings of all sources of evidence."""
    return [finding for reader in READERS for finding in reader(evidence)]


def diagnose(evidence: Evidence) -> Verdict:
    """Return the verdict: what failed first, and why."""
    every = findings(evidence)
    first = ranking.first(every)
    verdict = ranking.judged(first, every, evidence)
    if evidence.setup and not evidence.setup.ended:
        line = f"a setup line failed before the ranks started: {setup_failure.described(evidence.setup)}"
        verdict = replace(verdict, evidence=(*verdict.evidence, line))
    return replace(_with_secondary(verdict, evidence), flight=evidence.flight)


def has_only_secondary_errors(evidence: Evidence) -> bool:
    """Return whether all errors of ranks are secondary, that is, caused by another rank's failure.

    The record of the first error is then missing. On a shared file system, it may appear later.
    """
    if any(read_records.is_cause(one, evidence) for one in evidence.found):
        return False
    signalled = read_ends.first_signal(evidence)
    return bool(evidence.found or evidence.log.ends) and (signalled is None or signalled.how.startswith("Aborted"))


def _with_secondary(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Return the verdict with lines about the ranks that failed as a consequence."""
    groups: dict[str, list[Found]] = {}
    for one in evidence.ordered:
        if one.record.rank != verdict.rank and causes.is_secondary(one.record):
            groups.setdefault(causes.secondary_name(one.record), []).append(one)
    lines = []
    for name, group in groups.items():
        times = [evidence.when(one) for one in group]
        later = (
            f", up to {max(times) - verdict.time:.1f} s later"
            if verdict.time is not None and evidence.has_clock
            else ""
        )
        lines.append(f"{counted(len(group), 'other rank')}: {name}{later}")
    known = {verdict.rank, *(one.record.rank for group in groups.values() for one in group)}
    aborted = sorted({rank for end in evidence.log.ends if end.after_abort for rank in end.ranks} - known)
    if aborted:
        plural = "s" * (len(aborted) > 1)
        lines.append(f"{len(aborted)} rank{plural} terminated afterwards (rank{plural} {ranges(aborted)})")
    if evidence.clocks:
        ahead = min(evidence.clocks, key=lambda host: evidence.clocks[host])
        spread = max(evidence.clocks.values()) - min(evidence.clocks.values())
        lines.append(f"clocks of the nodes differ by {spread:.1f} s ({ahead} is ahead); times above are corrected")
    return replace(verdict, secondary=tuple(lines))
