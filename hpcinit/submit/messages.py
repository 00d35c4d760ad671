"""Prints the jobs that a submission made: as text, as JSON, or only their ids with -q."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from hpcinit.base import console, json_output
from hpcinit.base.text import counted
from hpcinit.config import hetjob, resources
from hpcinit.config.request import Request
from hpcinit.records import components
from hpcinit.submit import script
from hpcinit.submit.job_environment import DroppedVariables
from hpcinit.submit.sweep import Submitted as Sweep
from hpcinit.submit.transaction import Submitted


def print_reliably(*lines: str) -> None:
    """Print lines that must not get lost, such as a job id.

    If stdout fails (closed, a full disk, a broken pipe), these lines and all later output are printed on stderr.
    """
    if sys.stdout is not None:  # None after `>&-`
        try:
            print(*lines, sep="\n", flush=True)
            return
        except OSError:  # flushing the buffer at exit must not fail either
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
    sys.stdout = sys.stderr
    print(*lines, sep="\n", flush=True)


MOST_LINES = 40  # in the table of a sweep's tasks


def announce_script(about: str, text: str, files: Mapping[str, str], as_json: bool) -> None:
    """Print the script of a dry run, and the files that its job would read.

    about: which script it is, if there are several.
    """
    if as_json:
        fields = {"run": None, "combination": about, "script": text, "files": files, "changed_lines": None}
        print_reliably(json_output.line("script", fields))
        return
    if about:
        console.note(f"# {about}")
    sys.stdout.write(script.with_files(text, files))
    sys.stdout.flush()


def _announce_dropped(dropped: DroppedVariables) -> None:
    """Print which variables are not passed to the job.

    With -q, name only the secrets, because programs fail without them.
    """
    if text := str(DroppedVariables(secrets=dropped.secrets) if console.quiet() else dropped):
        console.always(f"not passed on to the job: {text}")


def announce_job(request: Request, done: Submitted, as_json: bool) -> None:
    config = request.config
    _announce_dropped(done.dropped)
    if done.missing:
        print(f"hpcinit: error: {done.missing}", file=sys.stderr)
    if as_json:
        print_reliably(_line(request, done.path, done.jobs, done.expected))
    elif console.quiet():
        print_reliably(*done.jobs)
    elif request.combination:
        print_reliably(f"{request.combination} -> job {done.job_id} on {config.cluster.name}, {done.path}")
    else:
        print_reliably(*_summary(request, done))
        if not config.wait and sys.stdout is not None and sys.stdout.isatty():
            print_reliably(_next_commands(config.runs_dir, done))


def _summary(request: Request, done: Submitted) -> list[str]:
    config = request.config
    chain = [f"chain: jobs {', '.join(done.jobs)}, each starts after the previous one"] if config.chain > 1 else []
    expected = [done.expected] if done.expected else []
    job = f"job {done.job_id} on {config.cluster.name}: {config.name}, {components.shape(hetjob.parts(config))}"
    request_line = [f"request: {text}"] if (text := resources.requested(config).described()) else []
    return [job, *request_line, *chain, f"run folder: {done.path}", *expected]


def _next_commands(runs_dir: str, done: Submitted) -> str:
    """Return commands to type next. If the run's folder is in ./runs, the commands contain only its name."""
    run = done.path.name if runs_dir == "runs" else done.path
    return f"watch it:  hpcinit logs -f {run}    cancel it:  hpcinit cancel {run}    if it fails:  hpcinit why {run}"


def _line(request: Request, path: Path, jobs: Sequence[str], expected: str, task: int | None = None) -> str:
    """Return the JSON object of a submitted run, as one line.

    jobs: the job ids. A chain has several.
    expected: when Slurm expects the job to start.
    task: the number of the task in a sweep, or None.
    """
    config = request.config
    fields = {
        "run": str(path),
        "job_id": jobs[0],
        "jobs": list(jobs),
        "task": task,
        "combination": request.combination,
        "cluster": config.cluster.name,
        "name": config.name,
        "nodes": config.nodes,
        "ranks_per_node": resources.ranks_per_node(config),
        "request": asdict(resources.requested(config)),
        "expected": expected,
    }
    return json_output.line("submit", fields)


def announce_sweep(requests: Sequence[Request], done: Sweep, as_json: bool) -> bool:
    """Print the jobs of a sweep, and the combinations that were not submitted.

    Return whether some combinations were not submitted.
    """
    cluster = requests[0].config.cluster.name
    _announce_dropped(done.dropped)
    jobs = list(dict.fromkeys(job.partition("_")[0] for job in done.ids.values()))
    if as_json:
        expected = "; ".join(done.expected)
        for request in requests:
            if job := done.ids.get(number := request.number):
                print_reliably(_line(request, done.path / str(number), [job], expected, number))
    elif console.quiet():
        print_reliably(*jobs)
    else:
        submitted = [request.config for request in requests if request.number in done.ids]
        at_once = requests[0].config.sweep.at_once or len(submitted)
        nodes = sum(sorted((config.nodes for config in submitted), reverse=True)[:at_once])
        tasks = (
            f"{counted(len(done.ids), 'task')} on {cluster} as job{'s' * (len(jobs) > 1)} {', '.join(jobs)}, using "
            f"up to {counted(nodes, 'node')} at once"
        )
        found = {resources.requested(request.config).described() for request in requests}
        same = [f"request of each task: {text}" for text in found if text and len(found) == 1]
        print_reliably(*_table(requests, done.ids), tasks, *same, f"run folder: {done.path}", *done.expected)
    left = [request.combination for request in requests if request.number not in done.ids]
    if left:
        why = f"{done.refused}\n" if done.refused else ""
        print(f"hpcinit: error: {why}not submitted: {_some(left)}", file=sys.stderr)
    return bool(left)


def _table(requests: Sequence[Request], ids: Mapping[int, str]) -> list[str]:
    """Return a line such as '4242_17  17  seed=17' for each task.

    For many tasks, return only the first and last lines.
    """
    lines = [f"{ids[r.number]:>12}  {r.number:>4}  {r.combination}" for r in requests if r.number in ids]
    if len(lines) <= MOST_LINES:
        return lines
    more = f"{'...':>12}  and {len(lines) - MOST_LINES + 2} more; show all:  hpcinit status"
    return [*lines[: MOST_LINES - 4], more, *lines[-2:]]


def _some(combinations: Sequence[str]) -> str:
    shown = "; ".join(combinations[:MOST_LINES])
    return shown if len(combinations) <= MOST_LINES else f"{shown}; and {len(combinations) - MOST_LINES} more"
