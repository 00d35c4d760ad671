"""`hpcinit why RUN [--json]`: the first failure of a run, its cause, and what to do next."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcinit.base import console
from hpcinit.base import errors as kinds
from hpcinit.base.console import plain
from hpcinit.base.errors import RequestError
from hpcinit.base.text import ranges
from hpcinit.observe import find_runs, progress, restarts, state
from hpcinit.records import run_folder
from hpcinit.slurm import reasons
from hpcinit.why import diagnosis, flight_recorder, gather_evidence, hang_verdict, node_exclusion
from hpcinit.why.evidence import Evidence, Verdict

WELL, ASKED = kinds.NONE, kinds.STOPPED  # of a verdict on a run in which nothing failed
UNSAID = (kinds.UNKNOWN, kinds.SCRIPT)  # of a verdict that names no cause
TAKEN = "Slurm has taken it from its nodes, and nobody says why: preempted, a lost node, or scontrol requeue"
SILENT = (
    "wait, or hpcinit logs --all; no step has been told yet: of a program that calls run.progress(step, total) it is "
    "known whether it hangs, and for which rank"
)
BY_ITSELF = "it begins again by itself, from its last checkpoint if the program has saved one"
AWAY = "Slurm's controller does not answer"
YOUNG_S, MOMENT_S = 3.0, 1.0  # srun tells of a rank that was killed within a second of its peers


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit why", description="What went wrong first in a run, and why.")
    what = "run folder, its name, a job id, or a folder of flight-recorder dumps"
    parser.add_argument("run", nargs="?", default="", help=what)
    find_runs.add_runs_dir(parser)
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    if options.run and (dumps := _only_dumps(Path(options.run))):
        return _of_dumps(dumps, options)
    path = find_runs.find_run(options.run, options.runs_dir)
    if find_runs.is_sweep(path):
        numbers = ranges(find_runs.combinations(path))
        raise RequestError(f"{path} is a sweep of the tasks {numbers}, expected one: hpcinit why {options.run}/0")
    now = state.read(path)
    verdict = explain_run(path, now)
    if options.json:
        told = {"run": str(path), "state": now.name, "job_id": now.job_id, "restarts": restarts.document(path)}
        hang = verdict.flight.document()
        known = {"verdict": verdict.headline, **asdict(verdict), **hang}
        known["secondary"] = [*verdict.secondary, *hang["secondary"]]
        known.pop("flight")
        print(json.dumps({**told, **known}))
    elif options.quiet:
        print(plain(verdict.headline))
    else:
        print(plain("\n".join(lines(path, verdict))))
    return 0


def _only_dumps(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    """The dumps in a folder of theirs alone, or in the folder flight/ of a run; {} for any other folder."""
    if any((folder / name).exists() for name in (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP)):
        return {}
    return flight_recorder.read_folder(folder)


def _of_dumps(dumps: Mapping[int, Mapping[str, Any]], options: argparse.Namespace) -> int:
    """Print which ranks cause the hang of any job, by the dumps of its ranks."""
    found = hang_verdict.verdict(dumps)
    first, *rest = found.lines() or (f"the dumps of {len(dumps)} ranks show no rank that waits in a collective",)
    if options.json:
        kind = found.culprits[0].kind if found.culprits else kinds.UNKNOWN if found else WELL
        print(json.dumps({"verdict": first, "kind": kind, "ranks": sorted(dumps), **found.document()}))
    elif options.quiet:
        print(plain(first))
    else:
        print("\n".join(map(plain, [first, *(f"  {line}" for line in rest)])))
        for advice in dict.fromkeys(f"what to do about rank {one.rank}: {one.advice}" for one in found.culprits[:3]):
            print(plain(advice))
        print("\n".join(f"  {line}" for line in found.document()["secondary"]), end="\n" if found.victims else "")
    return 0


def explain_run(path: Path, now: state.State) -> Verdict:
    """now: the run's state, as asked before. Nodes to blame are counted (hpcinit nodes)."""
    if now.name == "PENDING" and not now.again:
        meaning = reasons.explain(now.reason)
        return Verdict(
            f"job {now.job_id} waits{f' ({now.reason})' * bool(now.reason)}: nothing has failed", WELL, meaning
        )
    found = _evidence(path, now)
    node_exclusion.record_faulty_nodes(path, found)
    if now.again:
        return _again(path, now, found)
    if now.name == "COMPLETED":
        return _well(path, now, found)
    if now.away and not now.over:
        return _unheard(path, now, found)
    if not now.over and not now.forgotten:
        return _going(path, now, found)
    return _with_disk(path, diagnosis.diagnose(found))


def _with_disk(path: Path, verdict: Verdict) -> Verdict:
    """A failure without a cause may be one that nothing could be written of."""
    problem = gather_evidence.unwritable(path) if verdict.kind in UNSAID else ""
    if not problem:
        return verdict
    line = f"the run folder cannot be written ({problem}): error records and logs of this run may be missing"
    do = f"make room for {path} (df -h, quota) and submit again"
    return replace(verdict, kind=kinds.DISK, do=do, evidence=(line, *verdict.evidence))


def _evidence(path: Path, now: state.State) -> Evidence:
    """Gather again where only secondary errors exist, and once more while they are young: their cause may be under
    way."""
    found = gather_evidence.gather(path, now)
    if diagnosis.has_only_secondary_errors(found):
        found = gather_evidence.gather(path, now)
    if diagnosis.has_only_secondary_errors(found) and gather_evidence.age_s(path, found) < YOUNG_S:
        time.sleep(MOMENT_S)
        found = gather_evidence.gather(path, now)
    return found


def _well(path: Path, now: state.State, found: Evidence) -> Verdict:
    if why := progress.stop_note(path, now):
        return Verdict(f"nothing failed: the training stopped before its end, {why}", ASKED, step=found.step)
    return Verdict(f"nothing failed: the run has ended well  {progress.line(path)}".rstrip(), WELL, step=found.step)


def _again(path: Path, now: state.State, found: Evidence) -> Verdict:
    """A job that was requeued: how the attempt before ended, as its batch script or what it has left says."""
    head = f"job {now.job_id} waits{f' ({now.reason})' * bool(now.reason)} to begin again: "
    last = restarts.read(path)[-1:]
    told = last[0].reason if last and last[0].restart == (now.restart or 0) + 1 else ""
    if told in (run_folder.PREEMPTED, run_folder.TIME_LIMIT):
        return Verdict(f"{head}{restarts.WORDS[told]}{found.at_step}", ASKED, BY_ITSELF, step=found.step)
    verdict = diagnosis.diagnose(found)
    if verdict.kind in UNSAID and not found.found:
        return Verdict(f"{head}{TAKEN}{found.at_step}", kinds.REQUEUED, BY_ITSELF, step=found.step)
    return replace(verdict, headline=head + verdict.headline, do=_meanwhile(verdict))


def _meanwhile(verdict: Verdict) -> str:
    """What is left to do about a job that Slurm starts again."""
    return BY_ITSELF if not verdict.do or verdict.resubmit else f"{BY_ITSELF}; {verdict.do}"


def _unheard(path: Path, now: state.State, found: Evidence) -> Verdict:
    """The controller is away: what the run has left is all there is, and the job may go on."""
    if found.found or found.hang or found.log.ends or found.log.cancelled:
        verdict = diagnosis.diagnose(found)
        return replace(verdict, headline=f"{verdict.headline}  ({AWAY}: {now.reason})")
    head = f"{AWAY} ({now.reason}); as far as the run has left word nothing has failed  {progress.line(path)}"
    return Verdict(
        head.rstrip(), kinds.UNKNOWN, "ask again when it is back: jobs that run go on without it", step=found.step
    )


def _going(path: Path, now: state.State, found: Evidence) -> Verdict:
    """A job that is in the queue still may have failed all the same, or hang."""
    ended = now.name == "COMPLETING" and (found.log.cancelled or found.log.lost)
    if found.found or found.hang or found.flight or found.log.ends or ended:
        verdict = diagnosis.diagnose(found)
        return replace(verdict, headline=f"{verdict.headline}  (the job is {now.name} still)")
    told = progress.line(path)
    head = f"the job is {now.name}: nothing has failed  {told}".rstrip()
    return Verdict(head, WELL, "" if told else SILENT, step=found.step)


def lines(path: Path, verdict: Verdict) -> list[str]:
    """For a person, at most a screen."""
    run = shlex.quote(str(path))
    before = [restarts.restarts_line(restarts.read(path)), restarts.line_inside(restarts.read_inside(path))]
    told = [verdict.headline, *(f"  {line}" for line in [*verdict.evidence, *before] if line)]
    if verdict.do:
        told.append(f"what to do: {verdict.do}")
    told += [f"  {line}" for line in verdict.secondary]
    if verdict.kind in (WELL, ASKED):
        return told
    if verdict.rank is not None:
        told.append(f"its log:  hpcinit logs --rank {verdict.rank} {run}")
    told.append(
        f"all logs:  {shlex.quote(str(path / run_folder.LOGS))}    Slurm's own words:  hpcinit logs --job {run}"
    )
    return told
