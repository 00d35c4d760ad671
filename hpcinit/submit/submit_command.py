"""`hpcinit submit cluster=x nodes=8 [key=value ...] [-- train.py --its-own arguments]`"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import console, quoting
from hpcinit.base.errors import INTERRUPTED, ConfigError, MaybeSubmitted, RequestError, SubmitError
from hpcinit.config import checks, compose
from hpcinit.config.compose import Request, Search
from hpcinit.config.overrides import sbatchs_quality
from hpcinit.config.schema import Config
from hpcinit.submit import excluded_nodes, messages, sweep
from hpcinit.submit import transaction as submission


def parser() -> argparse.ArgumentParser:
    """What it takes beside Hydra's words and flags; --help is Hydra's, with conf/hydra/help."""
    parser = argparse.ArgumentParser(prog="hpcinit submit", add_help=False, allow_abbrev=False)
    return console.add_verbosity_options(parser, "one JSON object per job, for programs")


def main(argv: Sequence[str]) -> int:
    words, program = _split(list(argv))
    if wrong := sbatchs_quality(words):
        raise ConfigError(*wrong)
    options, words = console.parse_known_arguments(parser(), words)
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
        from hpcinit.submit.search_command import Trials  # noqa: PLC0415 - for sweepers that wait

        return Trials(lambda requests, runs: submit_all(requests, said, runs, options.json), options.json)

    return compose.main(words, prepare, lambda requests: submit_all(requests, said, as_json=options.json), search)


def submit_all(
    requests: Sequence[Request], said: Sequence[str], runs: dict[int, Path] | None = None, as_json: bool = False
) -> int:
    """Submit what is composed and checked, and follow it with wait=true. said: the command line, for the record.

    runs: gets the run folder of each request that was submitted, by its number. as_json: an object per job on stdout,
    and what is followed goes to stderr.
    """
    jobs: list[tuple[Request, submission.Submitted]] = []
    runs = {} if runs is None else runs
    requests, left_out = excluded_nodes.excluded(requests)
    for line in left_out:
        console.note(line)
    try:
        status = _all(requests, said, jobs, runs, as_json)
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
    as_json: bool,
) -> int:
    """Submit one after the other, into `jobs`, then follow those that are waited for. The highest exit status."""
    warnings = (text for request in requests for text in (*request.warnings, *checks.warnings(request.config)))
    for warning in dict.fromkeys(warnings):
        console.warning(warning)
    if sweep.is_one(requests):
        return _sweep(requests, argv, runs, as_json)
    status = 0
    for number, request in enumerate(requests):
        if request.config.dry_run:
            messages.announce_script(request.combination, submission.dry_run(request.config), as_json)
            continue
        try:
            done = submission.submit(request.config, request.document, argv)
            jobs.append((request, done))
            messages.announce_job(request, done, as_json)
            status = max(status, bool(done.missing))
        except SubmitError as error:
            if not request.combination:
                raise
            left = number + isinstance(error, MaybeSubmitted)
            raise type(error)(f"with {request.combination}: {error.problem}{_others(requests, left)}") from None
        if done.interrupted:
            run = shlex.quote(str(done.path))
            end = f"interrupted, but the job was submitted already; hpcinit cancel {run} ends it"
            print(f"{end}{_others(requests, number + 1)}", file=sys.stderr)
            return INTERRUPTED
        # This machine has no queue: with wait=true the jobs of a sweep run one after the other on it.
        if request.config.wait and request.config.cluster.engine == "local":
            status = max(status, followed := _follow(request, done, as_json))
            if followed == INTERRUPTED:
                print(f"hpcinit: interrupted{_others(requests, number + 1)}", file=sys.stderr)
                return INTERRUPTED
    for request, done in jobs:
        if request.config.wait and request.config.cluster.engine != "local" and status != INTERRUPTED:
            status = max(status, _follow(request, done, as_json))
    return status


def _sweep(requests: Sequence[Request], argv: Sequence[str], runs: dict[int, Path], as_json: bool) -> int:
    """Submit all of them as job arrays, their folders into `runs`; the exit status."""
    config = requests[0].config
    if config.dry_run:
        for about, text in sweep.dry_run(requests):
            messages.announce_script(about, text, as_json)
        return 0
    done = sweep.submit_all(requests, argv)
    runs.update({number: done.path / str(number) for number in done.ids})
    left = messages.announce_sweep(requests, done, as_json)
    if done.interrupted:
        run = shlex.quote(str(done.path))
        print(f"interrupted, but jobs were submitted already; hpcinit cancel {run} ends them", file=sys.stderr)
        return INTERRUPTED
    if config.wait:
        from hpcinit.submit.follow import follow_sweep  # noqa: PLC0415 - rich, only for those who wait

        with _beside(as_json):
            return max(left, follow_sweep(done.path))
    return int(left)


def _follow(request: Request, done: submission.Submitted, as_json: bool) -> int:
    from hpcinit.submit.follow import follow  # noqa: PLC0415 - rich, only for those who wait

    with _beside(as_json):
        if request.combination:
            print(f"== {request.combination}, {done.path.name} ==", flush=True)
        return follow(done.path)


def _beside(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Where stdout is a program's, what a person would follow goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _others(requests: Sequence[Request], number: int) -> str:
    """What became of a sweep that ends before its request `number`; nothing to say of a single request."""
    if len(requests) == 1 or number == len(requests):
        return ""
    if number == 0:
        return f"; none of the {len(requests)} combinations was submitted"
    return f"\nnot submitted: {'; '.join(request.combination for request in requests[number:])}"
