"""What the timelines of past runs tell of start-ups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcinit.facts import runfolder, spec, timeline
from hpcinit.facts.errors import RequestError, SpecError
from hpcinit.facts.fitting import Start


@dataclass(frozen=True)
class History:
    """starts: those that came to their end. unfinished: those that did not, which tell no time. without: runs that have
    no timeline. cluster: of all of them; max_s: the longest maximum that they were under."""

    starts: tuple[Start, ...]
    unfinished: int
    without: tuple[str, ...]
    cluster: str
    max_s: float


def read(runs: Iterable[Path]) -> History:
    """Raises RequestError for runs of several clusters: each has a law of its own."""
    starts: list[Start] = []
    without: list[str] = []
    clusters: dict[str, str] = {}
    unfinished, longest_s = 0, 0.0
    for run in runs:
        attempts = timeline.read(run)
        if not attempts:
            without.append(run.name)
            continue
        try:
            made = spec.load(run / runfolder.SPEC, to_run=False)
        except SpecError:
            without.append(run.name)
            continue
        clusters.setdefault(made.cluster, run.name)
        longest_s = max(longest_s, made.comm.timeout.max_s)
        for attempt in attempts:
            if attempt.complete and attempt.waited_s is not None:
                starts.append(Start(attempt.nodes, attempt.waited_s))
            else:
                unfinished += 1
    if len(clusters) > 1:
        each = ", ".join(f"{cluster} ({run})" for cluster, run in clusters.items())
        raise RequestError(
            f"these runs are of several clusters: {each}; name runs of one, each cluster has its own law"
        )
    return History(tuple(starts), unfinished, tuple(without), next(iter(clusters), ""), longest_s)
