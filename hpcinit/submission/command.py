"""`hpcinit submit cluster=x nodes=8 [key=value ...] [-- train.py --its-own arguments]`"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.config import checks, compose
from hpcinit.config.request import Request, Search
from hpcinit.config.schema import Config
from hpcinit.facts import quoting
from hpcinit.facts.errors import INTERRUPTED, MaybeSubmitted, RequestError, SubmitError
from hpcinit.submission import bad_nodes, sweep
from hpcinit.submission import submit as submission
from hpcinit.submission.say import say

MOST_LINES = 40  # of a table that is printed without being asked for


def main(argv: Sequence[str]) -> int:
    words, program = _split(list(argv))
    if "--version" in words:
        from importlib.metadata import version  # noqa: PLC0415

        print(f"hpcinit {version('hpcinit')}")
        return 0
    if "--" in argv and not program:
        raise RequestError("nothing stands after --, expected a program: hpcinit submit nodes=2 -- train.py")
    if program == ["-m"]:
        raise RequestError("nothing stands after -- -m, expected a module: hpcinit submit nodes=2 -- -m package.train")
    if program and not any(word.startswith("job=") for word in words):
        words.append("job=program")

    def prepare(request: Request) -> None:
        if program:
            _put(program, request.config, request.document)
        submission.check(request.config, request.document)

    said = ["hpcinit", "submit", *argv]

    def search() -> Search:
        from hpcinit.submission.search import Trials  # noqa: PLC0415 - for sweepers that wait

        return Trials(lambda requests, runs: submit_all(requests, said, runs))

    return compose.main(words, prepare, lambda requests: submit_all(requests, said), search)


def submit_all(requests: Sequence[Request], said: Sequence[str], runs: dict[int, Path] | None = None) -> int:
    """Submit what is composed and checked, and follow it with wait=true. said: the command line, for the record.

    runs: gets the run folder of each request that was submitted, by its number.
    """
    jobs: list[tuple[Request, submission.Submitted]] = []
    runs = {} if runs is None else runs
    requests, left_out = bad_nodes.excluded(requests)
    for line in left_out:
        print(line, file=sys.stderr)
    try:
        status = _all(requests, said, jobs, runs)
        runs.update({request.number: done.path for request, done in jobs})
        return status
    except KeyboardInterrupt:
        # submit() lets none through once its job exists.
        if len(jobs) == 1:
            said = f", but the job goes on: hpcinit status {shlex.quote(str(jobs[0][1].path))}"
        else:
            said = f"; {len(jobs)} were submitted, the others were not" if jobs else "; nothing was submitted"
        print(f"hpcinit: interrupted{said}", file=sys.stderr)
        return INTERRUPTED


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """What stands before the first -- and what after it."""
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _put(program: list[str], config: Config, document: dict[str, Any]) -> None:
    """Make `train.py --lr 3`, `-m package.train ...` or `any-command ...` what the job runs.

    Its arguments come behind those of job.args, as a sweep gives them, unless job names a program of its own.
    """
    job = config.job
    first = [] if job.script or job.module or job.command else list(job.args)
    job.script = job.module = job.command = None
    if program[0] == "-m":
        job.module, job.args = program[1], [*first, *program[2:]]
    elif program[0].endswith(".py"):
        job.script, job.args = program[0], [*first, *program[1:]]
    else:
        job.command, job.args = program[0], [*first, *program[1:]]
    if config.name == job.name == "program":
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(job.script or job.module or job.command or "").stem)
        config.name = stem if quoting.PLAIN_NAME.fullmatch(stem) else "program"
    document["name"] = config.name
    document["job"] |= {k: getattr(job, k) for k in ("script", "module", "command", "args")}


def _all(
    requests: Sequence[Request],
    argv: Sequence[str],
    jobs: list[tuple[Request, submission.Submitted]],
    runs: dict[int, Path],
) -> int:
    """Submit one after the other, into `jobs`, then follow those that are waited for. The highest exit status."""
    warnings = (text for request in requests for text in (*request.warnings, *checks.warnings(request.config)))
    for warning in dict.fromkeys(warnings):
        print(f"hpcinit: warning: {warning}", file=sys.stderr)
    if sweep.is_one(requests):
        return _sweep(requests, argv, runs)
    status = 0
    for number, request in enumerate(requests):
        if request.config.dry_run:
            _print_script(request)
            continue
        try:
            done = submission.submit(request.config, request.document, argv)
            jobs.append((request, done))
            _announce(request, done)
            status = max(status, bool(done.missing))
        except SubmitError as error:
            if not request.combination:
                raise
            said = str(error).removesuffix("nothing was submitted").rstrip("; \n")
            left = number + isinstance(error, MaybeSubmitted)
            raise type(error)(f"with {request.combination}: {said}{_others(requests, left)}") from None
        if done.interrupted:
            run = shlex.quote(str(done.path))
            end = f"interrupted, but the job was submitted already; hpcinit cancel {run} ends it"
            print(f"{end}{_others(requests, number + 1)}", file=sys.stderr)
            return INTERRUPTED
        # This machine has no queue: with wait=true the jobs of a sweep run one after the other on it.
        if request.config.wait and request.config.cluster.engine == "local":
            status = max(status, followed := _follow(request, done))
            if followed == INTERRUPTED:
                print(f"hpcinit: interrupted{_others(requests, number + 1)}", file=sys.stderr)
                return INTERRUPTED
    for request, done in jobs:
        if request.config.wait and request.config.cluster.engine != "local" and status != INTERRUPTED:
            status = max(status, _follow(request, done))
    return status


def _sweep(requests: Sequence[Request], argv: Sequence[str], runs: dict[int, Path]) -> int:
    """Submit all of them as job arrays, their folders into `runs`; the exit status."""
    config = requests[0].config
    if config.dry_run:
        for about, text in sweep.dry_run(requests):
            print(f"# {about}", file=sys.stderr, flush=True)
            sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    done = sweep.submit_all(requests, argv)
    runs.update({number: done.path / str(number) for number in done.ids})
    if said := str(done.dropped):
        print(f"not passed on to the job: {said}", file=sys.stderr)
    run = shlex.quote(str(done.path))
    jobs = list(dict.fromkeys(job.partition("_")[0] for job in done.ids.values()))
    say(
        *_table(requests, done.ids),
        f"{len(done.ids)} tasks on {config.cluster.name} as job{'s' * (len(jobs) > 1)} {', '.join(jobs)}",
        f"run folder: {done.path}",
        *done.expected,
    )
    left = [request.combination for request in requests if request.number not in done.ids]
    if left:
        why = f"{done.refused}\n" if done.refused else ""
        print(f"hpcinit: error: {why}not submitted: {_some(left)}", file=sys.stderr)
    if done.interrupted:
        print(f"interrupted, but jobs were submitted already; hpcinit cancel {run} ends them", file=sys.stderr)
        return INTERRUPTED
    if config.wait:
        from hpcinit.observe.follow import follow_sweep  # noqa: PLC0415 - rich, only for those who wait

        return max(bool(left), follow_sweep(done.path))
    return int(bool(left))


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


def _print_script(request: Request) -> None:
    if request.combination:
        print(f"# {request.combination}", file=sys.stderr, flush=True)
    sys.stdout.write(submission.dry_run(request.config))
    sys.stdout.flush()


def _announce(request: Request, done: submission.Submitted) -> None:
    config = request.config
    if said := str(done.dropped):
        print(f"not passed on to the job: {said}", file=sys.stderr)
    if done.missing:
        print(f"hpcinit: error: {done.missing}", file=sys.stderr)
    if request.combination:
        say(f"{request.combination} -> job {done.job_id} on {config.cluster.name}, {done.path}")
        return
    per_node = checks.ranks_per_node(config)
    shape = f"{config.nodes} node{'s' * (config.nodes != 1)} x {per_node} rank{'s' * (per_node != 1)}"
    chain = [f"chain: jobs {', '.join(done.jobs)}, each after the one before"] if config.chain > 1 else []
    expected = [done.expected] if done.expected else []
    job = f"job {done.job_id} on {config.cluster.name}: {config.name}, {shape}"
    say(job, *chain, f"run folder: {done.path}", *expected)


def _follow(request: Request, done: submission.Submitted) -> int:
    from hpcinit.observe.follow import follow  # noqa: PLC0415 - rich, only for those who wait

    if request.combination:
        print(f"== {request.combination}, {done.path.name} ==", flush=True)
    return follow(done.path)


def _others(requests: Sequence[Request], number: int) -> str:
    """What became of a sweep that ends before its request `number`; nothing to say of a single request."""
    if len(requests) == 1 or number == len(requests):
        return ""
    if number == 0:
        return f"; none of the {len(requests)} combinations was submitted"
    return f"\nnot submitted: {'; '.join(request.combination for request in requests[number:])}"
