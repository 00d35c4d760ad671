"""Implements `hpcinit why RUN [--replay] [--json]`: shows a run's first failure, its cause, and what to do next."""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcinit.base import console, failure_kinds, json_output
from hpcinit.base.console import plain_lines, say
from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted
from hpcinit.engine import slurm_engine
from hpcinit.observe import continuation, find_runs, progress, restarts, stacks, state
from hpcinit.observe.continuation import RESTARTS_ALONE
from hpcinit.records import hang_report, job_log, job_record, run_folder, world_size
from hpcinit.slurm import memory_use, reasons, slurm_client
from hpcinit.why import (
    diagnosis,
    flight_recorder,
    foreign_job,
    gather_evidence,
    hang_verdict,
    node_exclusion,
    replay,
    sweep_causes,
)
from hpcinit.why.evidence import Evidence, Verdict
from hpcinit.why.foreign_job import ForeignJob
from hpcinit.why.replay import Replay

OK, STOPPED = failure_kinds.NONE, failure_kinds.STOPPED  # kinds of a verdict on a run in which nothing failed
WITHOUT_CAUSE = (failure_kinds.UNKNOWN, failure_kinds.SCRIPT)  # kinds of a verdict that names no cause
UNEXPLAINED = (
    "Slurm requeued the job; no reason is recorded, but it may have been a preemption, a node failure, or scontrol "
    "requeue"
)
NO_STEP = (
    "wait, or read hpcinit logs --all; if the program seems to hang, hpcinit stacks RUN shows where each rank is. No "
    "step has been reported yet: hpcinit detects a hang, and the rank that causes it, in a program that calls "
    "run.progress(step, total)"
)
NOT_FINITE = (
    "the run has probably diverged: lower the learning rate or clip gradients, and resume from a checkpoint before "
    "that step"
)
FOREIGN = "squeue --all --me shows whether Slurm restarts the job; submit it again only if it does not"
UNREACHABLE = "Slurm's controller does not answer"
MOST_NOW = 4  # most groups of ranks with equal stacks in a verdict on a running job
# If the evidence is younger than YOUNG_S, wait MOMENT_S: srun may report a killed rank up to a second after its peers.
YOUNG_S, MOMENT_S = 3.0, 1.0


def parser() -> argparse.ArgumentParser:
    about = "Show the first failure of a run, its cause, and what to do."
    parser = argparse.ArgumentParser(prog="hpcinit why", description=about)
    what = "a run folder, its name or a job id; or a file or folder with dumps or with logs of another launcher"
    parser.add_argument("run", nargs="?", default="", help=what)
    find_runs.add_runs_dir(parser)
    again = "check the verdict on a hang: repeat its calls here with gloo on the CPU, first unchanged, then repaired"
    parser.add_argument("--replay", action="store_true", help=again)
    parser.add_argument(
        "--python", default="", metavar="PATH", help="a Python with torch for --replay; default: this one"
    )
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    dumps = _only_dumps(Path(options.run)) if options.run else {}
    readable = dumps if flight_recorder.has_a_dump(dumps) else {}
    if found := foreign_job.find(options.run, readable):
        return _of_logs(found, options, readable)
    if dumps:
        return _of_dumps(dumps, options)
    try:
        path = find_runs.find_run(options.run, options.runs_dir)
    except RequestError:
        if (other := foreign_job.of_slurm(options.run)) is None:
            raise
        return _of_logs(other, options)
    if find_runs.is_sweep(path):
        return _of_sweep(path, options)
    now = state.read(path)
    path, verdict = _of_worlds(path, now)
    replayed = _replay(*gather_evidence.dumps(path, now), options) if options.replay else None
    where = {"run": str(path), "state": now.name, "job_id": now.job_id, "restarts": restarts.document(path)}
    text = [] if options.json or options.quiet else lines(path, verdict)
    return _print(options, verdict, where, text, replayed)


def _print(
    options: argparse.Namespace,
    verdict: Verdict,
    where: Mapping[str, Any],
    text: Sequence[str],
    replayed: Replay | None,
    unknown: Sequence[str] = (),
) -> int:
    """Print a verdict as JSON, as one line, or as `text`. Return the exit status.

    where: additional fields for the JSON.
    """
    if options.json:
        print(_line(verdict, where, replayed, unknown))
    elif options.quiet:
        print(plain_lines([verdict.headline, *([replayed.text] if replayed else [])]))
    else:
        print(plain_lines([*text, *(replayed.lines() if replayed else [])]))
    return 0


def _replay(dumps: Mapping[int, Mapping[str, Any]], ended: Collection[int], options: argparse.Namespace) -> Replay:
    if not flight_recorder.has_a_dump(dumps):
        return Replay("not replayed: there is no dump of torch's flight recorder that can be read")
    say(f"replaying the calls of {counted(len(dumps), 'rank')} with gloo, for at most {replay.LIMIT_S:g} s")
    return replay.replay(dumps, ended, options.python)


def _of_sweep(path: Path, options: argparse.Namespace) -> int:
    """Print the causes of a sweep's failed tasks, each cause once. Return the exit status."""
    if options.replay:
        raise RequestError(
            f"--replay: {path} is a sweep, and a replay needs one run: name a task, such as {path / '0'}"
        )
    tasks = find_runs.read_sweep(path)
    groups = sweep_causes.grouped(tasks, lambda task: _of_worlds(task.path, task.state)[1])
    text = sweep_causes.lines(path, tasks, groups)
    if options.json:
        print(sweep_causes.document(path, tasks, groups))
    else:
        print(plain_lines(text[:1] if options.quiet else text))
    return 0


def _of_worlds(path: Path, now: state.State) -> tuple[Path, Verdict]:
    """Return the folder of a run and the verdict on it. With worlds=each, use the world that failed first."""
    folders = [path, *sorted(path.glob(f"{run_folder.COMPONENT}*"))]
    found = [(folder, explain_run(folder, now)) for folder in folders]
    return min(found, key=lambda one: (one[1].kind in (OK, *WITHOUT_CAUSE), one[1].time or math.inf))


def _only_dumps(folder: Path) -> Mapping[int, Mapping[str, Any]]:
    """Return the flight-recorder dumps in `folder`, by rank, even if none can be read.

    Return {} for a run folder and for a folder without dumps.
    """
    if any((folder / name).exists() for name in (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP)):
        return {}
    return flight_recorder.read_folder(folder, unreadable=True)


def _of_dumps(dumps: Mapping[int, Mapping[str, Any]], options: argparse.Namespace) -> int:
    """Print which ranks cause a hang, from the dumps of any job. Return the exit status."""
    found = hang_verdict.verdict(dumps)
    replayed = _replay(dumps, (), options) if options.replay else None
    first, *rest = found.lines() or (
        f"the dumps of {counted(len(dumps), 'rank')} show no rank that waits in a collective",
    )
    kind = found.kind if found.culprits or found.differ else failure_kinds.UNKNOWN if found.unknown else OK
    text = [first, *(f"  {line}" for line in rest)]
    text += dict.fromkeys(f"what to do about rank {one.rank}: {one.advice}" for one in found.culprits[:3])
    text += [f"  {line}" for line in found.document()["secondary"]]
    verdict = Verdict(first, kind, evidence=tuple(rest), flight=found)
    return _print(options, verdict, {"dumps": sorted(dumps)}, text, replayed)


def _of_logs(job: ForeignJob, options: argparse.Namespace, dumps: Mapping[int, Mapping[str, Any]] | None = None) -> int:
    """Print the verdict on a job that hpcinit did not start. Return the exit status."""
    verdict = diagnosis.diagnose(job.logs.evidence)
    if verdict.resubmit:  # the logs do not show whether Slurm requeues the job
        verdict = replace(verdict, do=FOREIGN, resubmit=False)
    replayed = _replay(dumps or {}, (), options) if options.replay else None
    known = {"job_id": job.slurm.get("JobID", ""), "state": foreign_job.state(job.slurm), "slurm": job.slurm}
    where = {**known, "files": [str(path) for path in job.files], "dumps": sorted(dumps or ())}
    text = [verdict.headline, *(f"  {line}" for line in verdict.evidence)]
    text += _advice(verdict)
    text += [f"  {line}" for line in verdict.secondary]
    text += [f"unknown: {line}" for line in job.unknown]
    if job.files:
        more = f" and {len(job.files) - 1} more" if len(job.files) > 1 else ""
        text.append(f"read: {job.files[0]}{more}")
    return _print(options, verdict, where, text, replayed, job.unknown)


def _advice(verdict: Verdict) -> list[str]:
    """Return what would make the verdict certain, and what to do."""
    text = [f"  needed to be certain: {verdict.doubt}"] if verdict.doubt else []
    return text + ([f"what to do: {verdict.do}"] if verdict.do else [])


# Fields that only some verdicts have. A verdict may be on a run, on the logs of another launcher, or on dumps.
_WITHOUT: Mapping[str, Any] = {
    "run": None,
    "state": "",
    "job_id": "",
    "restarts": None,
    "files": (),
    "slurm": {},
    "dumps": (),
}


def _line(verdict: Verdict, where: Mapping[str, Any], replayed: Replay | None, unknown: Sequence[str] = ()) -> str:
    """Return the verdict as JSON, including what the flight recorder's dumps show.

    where: additional fields.
    """
    fields = asdict(verdict)
    hang = verdict.flight.document()
    if verdict.rank is not None and verdict.rank not in [one["rank"] for one in hang["culprits"]]:
        hang["culprits"] = []  # the dumps show consequences of another failure
    known = {"verdict": fields.pop("headline"), "kind": fields.pop("kind"), "advice": fields.pop("do")}
    del fields["flight"], fields["ranks"]
    joined = {
        "secondary": [*verdict.secondary, *hang["secondary"]],
        "culprits": hang["culprits"] or culprits(verdict),
        "unknown": [*hang["unknown"], *unknown],
        "replay": asdict(replayed) if replayed else None,
    }
    return json_output.line("why", {**_WITHOUT, **where, **known, **fields, **joined})


def culprits(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the ranks at fault, each with the fields of a Culprit, or [] if unknown."""
    if verdict.rank is None:
        return []
    call = {"group": "", "description": "", "collective": "", "number": None, "waiting_ranks": ()}
    ranks = dict.fromkeys((verdict.rank, *(rank for rank in verdict.ranks if rank >= 0)))
    shared = {"kind": verdict.kind, **call, "evidence": verdict.headline}
    return [{"rank": rank, "host": verdict.host if rank == verdict.rank else "", **shared} for rank in ranks]


def explain_run(path: Path, now: state.State) -> Verdict:
    """Return the verdict on a run. Add a warning if a process group's size differs from the job's."""
    with slurm_client.on_cluster(job_record.clusters(path)):
        verdict, found = _explain(path, now), world_size.read(path)
        if (
            verdict.kind == failure_kinds.HOST_MEMORY
            and now.engine.uses_slurm
            and (used := memory_use.describe(now.job_id, lambda line: _is_other(path, now.job_id, line)))
        ):
            verdict = replace(verdict, evidence=(*verdict.evidence, used))
        if verdict.resubmit and (what := continuation.continues(path, now)):
            verdict = replace(verdict, do=what, resubmit=False)
    return replace(verdict, evidence=(f"warning: {found}", *verdict.evidence)) if found else verdict


def _is_other(path: Path, job_id: str, submitted: str) -> bool:
    return slurm_engine.is_other(job_record.last_submission(path), job_id, submitted, submitted)


def _explain(path: Path, now: state.State) -> Verdict:
    """Return the verdict on a run. Also add the nodes at fault to the record that `hpcinit nodes` shows.

    now: the state of the run.
    """
    if now.name == "PENDING" and not now.requeued:
        meaning = reasons.explain(now.reason)
        return Verdict(
            f"job {now.job_id} waits{f' ({now.reason})' * bool(now.reason)}: nothing has failed", OK, meaning
        )
    found = _evidence(path, now)
    node_exclusion.record_faulty_nodes(path, found)
    if now.requeued:
        return _again(path, now, found)
    if now.name == "COMPLETED":
        return _well(path, now, found)
    if now.away and not now.over:
        return _unheard(path, now, found)
    if not now.over and not now.purged:
        return _going(path, now, found)
    verdict = diagnosis.diagnose(found)
    return _chain_is_used_up(now, found, verdict) or _with_disk(path, now, verdict)


def _chain_is_used_up(now: state.State, found: Evidence, verdict: Verdict) -> Verdict | None:
    """Return the verdict if the last job of a chain ended before the program did, else None.

    Such a job exits with 143, because the program handled Slurm's SIGTERM.
    """
    early = now.exit_status == run_folder.ENDED_EARLY and bool(now.link) and not now.others
    ends = {end.how for end in found.log.ends if not end.after_abort} - {
        "Terminated",
        job_log.how(now.exit_status or 0),
    }
    if not early or ends or verdict.kind not in (*WITHOUT_CAUSE, failure_kinds.PROGRAM, failure_kinds.SIGNAL):
        return None
    head = f"the chain is used up: {now.link} ended before the program did, with exit status 143 (SIGTERM)"
    do = "submit again: it resumes if the program saved a checkpoint; chain=N with more jobs, or a larger time_min"
    return Verdict(f"{head}{found.at_step}", failure_kinds.TIME_LIMIT, do, step=found.step, resubmit=True)


def _with_disk(path: Path, now: state.State, verdict: Verdict) -> Verdict:
    """Return the verdict. If the cause is unknown and the run folder cannot be written, change its kind to DISK."""
    problem = gather_evidence.unwritable(path) if verdict.kind in WITHOUT_CAUSE else ""
    if not problem:
        return verdict
    line = f"the run folder cannot be written ({problem}): error records and logs of this run may be missing"
    do = f"free space for {path} (df -h, quota); {continuation.continues(path, now) or 'then submit again'}"
    return replace(verdict, kind=failure_kinds.DISK, do=do, evidence=(line, *verdict.evidence))


def _evidence(path: Path, now: state.State) -> Evidence:
    """Return the evidence about a run.

    If it has only secondary errors, read it again: on a shared file system, the first error may become visible late.
    """
    found = gather_evidence.gather(path, now)
    if diagnosis.has_only_secondary_errors(found):
        found = gather_evidence.gather(path, now)
    if diagnosis.has_only_secondary_errors(found) and gather_evidence.age_s(path, found) < YOUNG_S:
        time.sleep(MOMENT_S)
        found = gather_evidence.gather(path, now)
    return found


def _well(path: Path, now: state.State, found: Evidence) -> Verdict:
    use = progress.ineffective_options(path, now)
    evidence = (use.note,) if use.note else ()
    document = progress.read(path)
    if progress.not_finite(document):
        head = f"nothing failed, but {progress.not_finite_note(document)}  step {document['step']}/{document['total']}"
        return Verdict(head, failure_kinds.NOT_A_NUMBER, NOT_FINITE, step=found.step, evidence=evidence)
    if why := progress.stop_note(path, now):
        head = f"nothing failed: training stopped before its end, {why}"
        return Verdict(head, STOPPED, use.advice, step=found.step, evidence=evidence)
    head = f"nothing failed: the run completed  {progress.line(path)}".rstrip()
    return Verdict(head, OK, use.advice, step=found.step, evidence=evidence)


def _again(path: Path, now: state.State, found: Evidence) -> Verdict:
    """Return the verdict on the previous attempt of a job that Slurm has requeued."""
    head = f"job {now.job_id} waits{f' ({now.reason})' * bool(now.reason)} to restart: "
    last = restarts.read(path)[-1:]
    reason = last[0].reason if last and last[0].restart == (now.restart or 0) + 1 else ""
    if reason in (run_folder.PREEMPTED, run_folder.TIME_LIMIT):
        return Verdict(f"{head}{restarts.REASONS[reason]}{found.at_step}", STOPPED, RESTARTS_ALONE, step=found.step)
    verdict = diagnosis.diagnose(found)
    if verdict.kind in WITHOUT_CAUSE and not found.found:
        return Verdict(f"{head}{UNEXPLAINED}{found.at_step}", failure_kinds.REQUEUED, RESTARTS_ALONE, step=found.step)
    return replace(verdict, headline=head + verdict.headline, do=_meanwhile(verdict))


def _meanwhile(verdict: Verdict) -> str:
    """Return advice for a job that Slurm restarts."""
    return RESTARTS_ALONE if not verdict.do or verdict.resubmit else f"{RESTARTS_ALONE}; {verdict.do}"


def _unheard(path: Path, now: state.State, found: Evidence) -> Verdict:
    """Return the verdict from the run folder alone, because Slurm's controller is unreachable.

    The job may still be running.
    """
    if found.found or found.hang or found.log.ends or found.log.cancelled:
        verdict = diagnosis.diagnose(found)
        return replace(verdict, headline=f"{verdict.headline}  ({UNREACHABLE}: {now.reason})")
    head = f"{UNREACHABLE} ({now.reason}); no failure is recorded in the run folder  {progress.line(path)}"
    return Verdict(
        head.rstrip(),
        failure_kinds.UNKNOWN,
        "try again when it is back: running jobs continue without it",
        step=found.step,
    )


def _going(path: Path, now: state.State, found: Evidence) -> Verdict:
    """Return the verdict on a job that is still in the queue. Some of its ranks may have failed or may hang."""
    live: Sequence[stacks.Group] = ()
    if now.name == "RUNNING" and (found.hang or found.silence or found.flight) and not found.log.ends:
        live = stacks.groups_now(path)
    verdict = _of_unfinished(path, now, _with_states(found, live))
    shown = live if verdict.kind in (OK, failure_kinds.HANG) else ()
    return replace(verdict, evidence=(*(f"now: {group.headline()}" for group in shown[:MOST_NOW]), *verdict.evidence))


def _with_states(found: Evidence, live: Sequence[stacks.Group]) -> Evidence:
    """Return the evidence with the current process states of the ranks that wrote no stack.

    Such a rank is stopped, or C code holds the GIL.
    """
    states = stacks.blocked_ranks(live)
    hang = found.hang and hang_report.with_states(found.hang, states)
    return replace(found, hang=hang, silence=found.silence and hang_report.with_states(found.silence, states))


def _of_unfinished(path: Path, now: state.State, found: Evidence) -> Verdict:
    ended = now.name == "COMPLETING" and (found.log.cancelled or found.log.lost)
    if found.found or found.hang or (found.flight and not found.silence) or found.log.ends or ended:
        verdict = diagnosis.diagnose(found)
        return replace(verdict, headline=f"{verdict.headline}  (the job is still {now.name})")
    if found.silence:
        return diagnosis.diagnose_silence(found, found.silence, f"the job is {now.name}: nothing has failed")
    document = progress.read(path)
    if progress.not_finite(document):
        head = f"the job is {now.name}: nothing has failed, but {progress.not_finite_note(document)}"
        return Verdict(head, failure_kinds.NOT_A_NUMBER, NOT_FINITE, step=found.step)
    reported = progress.summary(document)
    head = f"the job is {now.name}: nothing has failed  {reported}".rstrip()
    return Verdict(head, OK, "" if reported else NO_STEP, step=found.step)


def lines(path: Path, verdict: Verdict) -> list[str]:
    """Return the verdict as text for a terminal, at most one screen long."""
    run = shlex.quote(str(path))
    before = [restarts.restarts_line(restarts.read(path)), restarts.line_inside(restarts.read_inside(path))]
    text = [verdict.headline, *(f"  {line}" for line in [*verdict.evidence, *before] if line)]
    text += _advice(verdict)
    text += [f"  {line}" for line in verdict.secondary]
    if verdict.kind in (OK, STOPPED):
        return text
    if verdict.rank is not None:
        text.append(f"log of rank {verdict.rank}:  hpcinit logs --rank {verdict.rank} {run}")
    text.append(f"all logs:  {shlex.quote(str(path / run_folder.LOGS))}    Slurm's output:  hpcinit logs --job {run}")
    return text
