"""A report in words: lines for any place, a table for a terminal, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hpcinit.facts import timeline
from hpcinit.facts.terminal import plain
from hpcinit.observe.report import phases
from hpcinit.observe.report.phases import Phase, Report, seconds

if TYPE_CHECKING:
    from rich.table import Table

HEAD = ("phase", "min", "median", "max", "ends within", "slowest, and for whom all waited")


def headline(report: Report) -> str:
    """'job 43.0.0: 4 ranks on 2 nodes (slurm), started 14:02:11, up 12.3 s after that'"""
    attempt = report.attempt
    begun = timeline.begun(attempt)
    at = f", started {datetime.fromtimestamp(begun):%Y-%m-%d %H:%M:%S}" if begun else ""
    plural = "s" * (attempt.world_size != 1), "s" * (attempt.nodes != 1)
    shape = f"{attempt.world_size} rank{plural[0]} on {attempt.nodes} node{plural[1]} ({attempt.launcher})"
    ends = [rank.moments[timeline.LAST] for rank in attempt.ranks if timeline.LAST in rank.moments]
    if phases.before_init(report):
        return f"job {attempt.job}: {shape}{at}, the program has not called hpcinit.init()"
    up = f", up {seconds(max(ends) - begun)} after that" if attempt.complete and begun else ", not all are up"
    return f"job {attempt.job}: {shape}{at}{up}"


def row(report: Report, phase: Phase) -> tuple[str, ...]:
    """In the columns of HEAD."""
    behind = phases.waited_for(report, phase)
    about = phases.named(phases.slow(report, phase))
    if behind:
        about = f"for {behind[0]}, {seconds(behind[1])} after half of them"
    name = f"{phase.name}{' *' * phase.waits}"
    spread = "" if phase.ends == phases.QUEUE else seconds(phase.spread)
    return (name, seconds(phase.least), seconds(phase.median), seconds(phase.most), spread, about)


def notes(report: Report) -> Iterator[str]:
    """What else is to be known: who is missing, the time-out, the clocks."""
    yield from phases.missing(report)
    if any(phase.waits for phase in report.phases):
        yield "* of these phases most is waiting for others"
    yield from (line for line in (timeout(report), clocks(report)) if line)


def timeout(report: Report) -> str:
    attempt = report.attempt
    if not attempt.law:
        return ""
    waited = attempt.waited_s
    used = ""
    if waited is not None and attempt.timeout_s and attempt.complete:
        used = f"; the longest wait under it was {seconds(waited)}, {waited / attempt.timeout_s:.0%}"
    return f"time-out of the start-up: {attempt.law}{used}"


def clocks(report: Report) -> str:
    """How far the nodes' clocks differ, and how well that is known."""
    others = {host: clock for host, clock in report.clocks.items() if clock.within_s or clock.offset_s}
    unknown = sorted(set(report.hosts.values()) - report.clocks.keys())
    parts = []
    if off := {host: clock for host, clock in others.items() if clock.offset_s}:
        worst = max(off, key=lambda host: abs(off[host].offset_s))
        one = off[worst]
        count = f"clocks of {len(off)} node{'s' * (len(off) > 1)} differ from rank 0's and are corrected"
        parts.append(f"{count}, most {worst}'s: by {-one.offset_s:+.3f} s to within {seconds(one.within_s)}")
    elif others:
        parts.append("the nodes' clocks agree as far as can be told")
    if right := [clock.within_s for clock in others.values() if not clock.offset_s]:
        parts.append(f"{'the others' if off else 'they'} may differ by up to {seconds(max(right))}")
    if unknown:
        parts.append(f"nothing is known of the clock{'s' * (len(unknown) > 1)} of {', '.join(unknown[:4])}")
    return "; ".join(parts)


def lines(report: Report) -> Iterator[str]:
    """Without a terminal."""
    yield headline(report)
    rows = [HEAD, *(row(report, phase) for phase in report.phases)]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEAD) - 1)]
    for line in rows:
        name, *numbers = (
            text.ljust(width) if not at else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=False))
        )
        yield f"  {name}  {'  '.join(numbers)}  {line[-1]}".rstrip()
    yield from notes(report)


def table(report: Report) -> Table:
    """For a terminal."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for column, name in enumerate(HEAD):
        numbers = 0 < column < len(HEAD) - 1
        made.add_column(name, justify="right" if numbers else "left", no_wrap=column < len(HEAD) - 1)
    for phase in report.phases:
        cells = row(report, phase)
        style = "dim" if phase.waits else ""
        about = Text(plain(cells[-1]), "yellow" if cells[-1] else "")
        made.add_row(*(Text(plain(cell), style) for cell in cells[:-1]), about)
    return made


def document(report: Report) -> dict[str, Any]:
    """For programs. Times in seconds; moments since 1970, by the clock of rank 0's node."""
    attempt = report.attempt
    return {
        "job": attempt.job,
        "launcher": attempt.launcher,
        "world_size": attempt.world_size,
        "nodes": attempt.nodes,
        "complete": attempt.complete,
        "absent": attempt.absent,
        "silent_nodes": report.silent_hosts,
        "missing": phases.missing(report),
        "timeout_s": attempt.timeout_s,
        "law": attempt.law,
        "waited_s": attempt.waited_s,
        "clocks": {
            host: {"offset_s": clock.offset_s, "within_s": clock.within_s} for host, clock in report.clocks.items()
        },
        "phases": [_phase(report, phase) for phase in report.phases],
        "ranks": [
            {"rank": rank.rank, "host": rank.host, "local_rank": rank.local_rank, "moments": dict(rank.moments)}
            for rank in attempt.ranks
        ],
    }


def _phase(report: Report, phase: Phase) -> dict[str, Any]:
    behind = phases.waited_for(report, phase)
    return {
        "name": phase.name,
        "ends": phase.ends,
        "waits": phase.waits,
        **{"min_s": phase.least, "median_s": phase.median, "max_s": phase.most, "spread_s": phase.spread},
        "slowest": [_slow(one) for one in phases.slow(report, phase)],
        "waited_for": {**_slow(behind[0]), "behind_s": behind[1]} if behind else None,
    }


def _slow(one: phases.Slow) -> dict[str, Any]:
    ranks: Sequence[int] = one.ranks
    return {"host": one.host, "ranks": list(ranks), "whole_node": one.whole, "took_s": one.took}
