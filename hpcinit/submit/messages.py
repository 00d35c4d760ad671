"""What a submission prints about its jobs: text, JSON, or with -q the ids alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from hpcinit.base import console
from hpcinit.config import checks
from hpcinit.config.compose import Request
from hpcinit.submit.sweep import Submitted as Sweep
from hpcinit.submit.transaction import Submitted

# Lines that must not be lost: a job's id.


def say(*lines: str) -> None:
    """Print on stdout; where that cannot take them (closed, a full disk, a pipe that nobody reads), on stderr.

    What is printed after that goes to stderr too.
    """
    if sys.stdout is not None:  # `>&-`
        try:
            print(*lines, sep="\n", flush=True)
            return
        except OSError:  # what is still in the buffer must fail nobody at the end
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
    sys.stdout = sys.stderr
    print(*lines, sep="\n", flush=True)


MOST_LINES = 40  # of a table that is printed without being asked for


def announce_script(about: str, text: str, as_json: bool) -> None:
    """Of a dry run. about: which of several, else ''."""
    if as_json:
        say(json.dumps({"combination": about, "script": text}))
        return
    if about:
        console.note(f"# {about}")
    sys.stdout.write(text)
    sys.stdout.flush()


def announce_job(request: Request, done: Submitted, as_json: bool) -> None:
    config = request.config
    if said := str(done.dropped):
        console.note(f"not passed on to the job: {said}")
    if done.missing:
        print(f"hpcinit: error: {done.missing}", file=sys.stderr)
    if as_json:
        say(json.dumps(_document(request, done)))
    elif console.quiet():
        say(*done.jobs)
    elif request.combination:
        say(f"{request.combination} -> job {done.job_id} on {config.cluster.name}, {done.path}")
    else:
        say(*_words(request, done))
        if not config.wait and sys.stdout is not None and sys.stdout.isatty():
            say(_next(config.runs_dir, done))


def _words(request: Request, done: Submitted) -> list[str]:
    config, per_node = request.config, checks.ranks_per_node(request.config)
    shape = f"{config.nodes} node{'s' * (config.nodes != 1)} x {per_node} rank{'s' * (per_node != 1)}"
    chain = [f"chain: jobs {', '.join(done.jobs)}, each after the one before"] if config.chain > 1 else []
    expected = [done.expected] if done.expected else []
    job = f"job {done.job_id} on {config.cluster.name}: {config.name}, {shape}"
    return [job, *chain, f"run folder: {done.path}", *expected]


def _next(runs_dir: str, done: Submitted) -> str:
    """For a person, who may not know yet: a run's name is enough where its folder is in ./runs."""
    run = done.path.name if runs_dir == "runs" else done.path
    return f"watch it:  hpcinit logs -f {run}    end it:  hpcinit cancel {run}    if it fails:  hpcinit why {run}"


def _document(request: Request, done: Submitted) -> dict[str, object]:
    config = request.config
    return {
        "job_id": done.job_id,
        "jobs": list(done.jobs),  # of a chain all
        "run": str(done.path),
        "cluster": config.cluster.name,
        "name": config.name,
        "nodes": config.nodes,
        "ranks_per_node": checks.ranks_per_node(config),
        "combination": request.combination,
        "expected": done.expected,
    }


def announce_sweep(requests: Sequence[Request], done: Sweep, as_json: bool) -> bool:
    """Whether some were left out; those are named."""
    cluster = requests[0].config.cluster.name
    if said := str(done.dropped):
        console.note(f"not passed on to the job: {said}")
    jobs = list(dict.fromkeys(job.partition("_")[0] for job in done.ids.values()))
    if as_json:
        say(*(json.dumps(_task(request, done)) for request in requests if request.number in done.ids))
    elif console.quiet():
        say(*jobs)
    else:
        tasks = f"{len(done.ids)} tasks on {cluster} as job{'s' * (len(jobs) > 1)} {', '.join(jobs)}"
        say(*_table(requests, done.ids), tasks, f"run folder: {done.path}", *done.expected)
    left = [request.combination for request in requests if request.number not in done.ids]
    if left:
        why = f"{done.refused}\n" if done.refused else ""
        print(f"hpcinit: error: {why}not submitted: {_some(left)}", file=sys.stderr)
    return bool(left)


def _task(request: Request, done: Sweep) -> dict[str, object]:
    return {
        "job_id": done.ids[request.number],
        "task": request.number,
        "run": str(done.path / str(request.number)),
        "cluster": request.config.cluster.name,
        "combination": request.combination,
    }


def _table(requests: Sequence[Request], ids: Mapping[int, str]) -> list[str]:
    """'4242_17  17  seed=17': what each task is; of many the first and the last ones."""
    lines = [f"{ids[r.number]:>12}  {r.number:>4}  {r.combination}" for r in requests if r.number in ids]
    if len(lines) <= MOST_LINES:
        return lines
    more = f"{'...':>12}  and {len(lines) - MOST_LINES + 2} more; hpcinit status shows all"
    return [*lines[: MOST_LINES - 4], more, *lines[-2:]]


def _some(words: Sequence[str]) -> str:
    shown = "; ".join(words[:MOST_LINES])
    return shown if len(words) <= MOST_LINES else f"{shown}; and {len(words) - MOST_LINES} more"
