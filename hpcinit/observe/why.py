"""`hpcinit why RUN [--json]`: the first failure of a run, its cause, and what to do next."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hpcinit.facts import failure, runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.facts.evidence import Evidence, Verdict
from hpcinit.facts.ranges import ranges
from hpcinit.observe import bad_nodes, evidence, find, progress, reasons, state, sweep

WELL, ASKED = "none", "stopped"  # kinds of a verdict on a run in which nothing failed
YOUNG_S, MOMENT_S = 3.0, 1.0  # srun tells of a rank that was killed within a second of its peers


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcinit why", description="What went wrong first in a run, and why.")
    parser.add_argument("run", help="run folder, its name, or a job id")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    options = parser.parse_args(argv)
    path = find.find(options.run, options.runs_dir)
    if sweep.is_sweep(path):
        numbers = ranges(sweep.combinations(path))
        raise RequestError(f"{path} is a sweep of the tasks {numbers}, expected one: hpcinit why {options.run}/0")
    now = state.read(path)
    verdict = of_run(path, now)
    if options.json:
        print(json.dumps({"run": str(path), "state": now.name, "job_id": now.job_id, **asdict(verdict)}))
    else:
        print("\n".join(lines(path, verdict)))
    return 0


def of_run(path: Path, now: state.State) -> Verdict:
    """now: the run's state, as asked before. Nodes to blame are counted (hpcinit nodes)."""
    if now.name == "PENDING":
        meaning = reasons.explain(now.reason)
        return Verdict(
            f"job {now.job_id} waits{f' ({now.reason})' * bool(now.reason)}: nothing has failed", WELL, meaning
        )
    found = _evidence(path, now)
    bad_nodes.note(path, found)
    if now.name == "COMPLETED":
        return _well(path, found)
    if not now.over and now.source != state.NOBODY and not now.forgotten:
        return _going(path, now, found)
    return failure.judge(found)


def _evidence(path: Path, now: state.State) -> Evidence:
    """Gathered anew where only echoes are there, and once more while they are young: their cause may be under way."""
    found = evidence.gather(path, now)
    if failure.has_only_echoes(found):
        found = evidence.gather(path, now)
    if failure.has_only_echoes(found) and evidence.age_s(path, found) < YOUNG_S:
        time.sleep(MOMENT_S)
        found = evidence.gather(path, now)
    return found


def _well(path: Path, found: Evidence) -> Verdict:
    try:
        stopped = json.loads((path / runfolder.STOPPED).read_text())
        return Verdict(
            f"nothing failed: the training stopped before its end, {stopped['reason']}", ASKED, step=found.step
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Verdict(f"nothing failed: the run has ended well  {progress.line(path)}".rstrip(), WELL, step=found.step)


def _going(path: Path, now: state.State, found: Evidence) -> Verdict:
    """A job that is in the queue still may have failed all the same, or hang."""
    if found.found or found.hang or found.log.ends:
        verdict = failure.judge(found)
        return replace(verdict, headline=f"{verdict.headline}  (the job is {now.name} still)")
    return Verdict(f"the job is {now.name}: nothing has failed  {progress.line(path)}".rstrip(), WELL, step=found.step)


def lines(path: Path, verdict: Verdict) -> list[str]:
    """For a person, at most a screen."""
    run = shlex.quote(str(path))
    told = [verdict.headline, *(f"  {line}" for line in verdict.evidence)]
    if verdict.do:
        told.append(f"what to do: {verdict.do}")
    told += [f"  {line}" for line in verdict.echoes]
    if verdict.kind in (WELL, ASKED):
        return told
    if verdict.rank is not None:
        told.append(f"its log:  hpcinit logs --rank {verdict.rank} {run}")
    told.append(f"all logs:  {shlex.quote(str(path / runfolder.LOGS))}    Slurm's own words:  hpcinit logs --job {run}")
    return told
