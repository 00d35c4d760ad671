"""Implements `hpcinit submit cluster=x nodes=8 [key=value ...] [-- train.py --its-own arguments]`."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcinit.base import console, json_output, quoting
from hpcinit.base.errors import INTERRUPTED, ConfigError, Interrupted, MaybeSubmitted, RequestError, SubmitError
from hpcinit.base.text import counted
from hpcinit.checks import all_checks
from hpcinit.config import compose, keys, spellings
from hpcinit.config.overrides import sbatchs_quality
from hpcinit.config.request import Request, Search
from hpcinit.submit import excluded_nodes, messages, program_arguments, sweep
from hpcinit.submit import transaction as submission

SMOKE = "hpcinit.jobs.smoke"  # runs if the command line has no `-- train.py`


def parser() -> argparse.ArgumentParser:
    """Return the parser for the options of `hpcinit submit`. Hydra parses the other arguments.

    Hydra also prints --help, from conf/hydra/help.
    """
    parser = argparse.ArgumentParser(prog="hpcinit submit", add_help=False, allow_abbrev=False)
    return console.add_verbosity_options(parser, "one JSON object per job, for programs")


def main(argv: Sequence[str]) -> int:
    arguments, program = split_program(argv, "hpcinit submit nodes=2")
    if wrong := sbatchs_quality(arguments):
        raise ConfigError(*wrong)
    options, arguments = console.parse_known_arguments(parser(), arguments)
    if "--version" in arguments:
        from importlib.metadata import version  # noqa: PLC0415

        print(f"hpcinit {version('hpcinit')}")
        return 0
    match arguments:
        case ["--help" | "-h", "all"]:
            print(keys.help_text(every=True))
            return 0
        case ["--help" | "-h", key] if not key.startswith("-"):
            print(keys.explained(spellings.key_meant(key.partition("=")[0].lstrip("+"))))
            return 0
    if program and not any(argument.startswith("job=") for argument in arguments):
        arguments.append("job=program")

    def prepare(request: Request) -> None:
        if program:
            set_program(program, request, ["hpcinit", "submit", *arguments])
        all_checks.check(request.config, request.document)

    def submit(requests: Sequence[Request]) -> int:
        if not program and requests[0].config.job.module == SMOKE and not requests[0].config.dry_run:
            console.note(
                f"no program after --, so this submits the smoke test (time limit: {requests[0].config.time_min} min). "
                f"To submit your program: hpcinit submit {shlex.join([*arguments, '--', 'train.py'])}"
            )
        typed = program_arguments.typed
        requests = [replace(request, given=typed(arguments, request.parameters)) for request in requests]
        if any(flag in arguments for flag in program_arguments.MULTIRUN):
            program_arguments.check_lists(program, arguments, len(requests))
            program_arguments.check_distinct(requests, program)
        return submit_all(requests, command, as_json=options.json)

    command = ["hpcinit", "submit", *argv]

    def search() -> Search:
        from hpcinit.submit.search_command import Trials  # noqa: PLC0415 - for sweepers that wait

        return Trials(lambda requests, runs: submit_all(requests, command, runs, options.json), options.json)

    return compose.main(arguments, prepare, submit, search, cluster_required=True)


def submit_all(
    requests: Sequence[Request], argv: Sequence[str], runs: dict[int, Path] | None = None, as_json: bool = False
) -> int:
    """Submit the requests and return an exit status. With wait=true, wait until the runs have ended.

    The requests must have passed their checks.

    argv: the command line to record.
    runs: a dict to which the function adds the run folder of each submitted request, by the number of the request.
    as_json: whether to print one JSON object per job on stdout, and the output of wait=true on stderr.
    """
    jobs: list[tuple[Request, submission.Submitted]] = []
    runs = {} if runs is None else runs
    try:
        requests = announced(requests)
        status = _all(requests, argv, jobs, runs, as_json)
        runs.update({request.number: done.path for request, done in jobs})
        return status
    except KeyboardInterrupt:
        # submit() defers the interrupt once its job exists.
        if len(jobs) == 1:
            state = f", but the job is still running: hpcinit status {shlex.quote(str(jobs[0][1].path))}"
        else:
            state = f"; only {counted(len(jobs), 'job')} submitted" if jobs else "; nothing was submitted"
        print(f"hpcinit: interrupted{state}", file=sys.stderr)
        if as_json:
            print(json_output.line("error", Interrupted(f"interrupted{state}").document()), flush=True)
        return INTERRUPTED


def announced(requests: Sequence[Request]) -> Sequence[Request]:
    """Return the requests with failed nodes excluded. Print the excluded nodes and all warnings, each only once."""
    requests, notes = excluded_nodes.excluded(requests)
    for line in notes:
        console.always(line)
    warnings = (
        text
        for request in requests
        for text in (*request.warnings, *request.unread.values(), *all_checks.warnings(request.config))
    )
    for warning in dict.fromkeys(warnings):
        console.warning(warning)
    return requests


def split_program(argv: Sequence[str], command: str) -> tuple[list[str], list[str]]:
    """Split the command line at the first --.

    Return the arguments before it, and the program after it ([] without a --).

    Raise RequestError if the program is incomplete.

    command: the name of the command, for the example in the error.
    """
    if "--" not in argv:
        return list(argv), []
    at = list(argv).index("--")
    arguments, program = list(argv[:at]), list(argv[at + 1 :])
    if not program:
        raise RequestError(f"no program after --, expected one: {command} -- train.py")
    if program == ["-m"]:
        raise RequestError(f"no module after -- -m, expected one: {command} -- -m package.train")
    if program[0].startswith("-") and program[0] != "-m" and (program[0] != "--" or program[1:2] in ([], ["--"])):
        raise RequestError(
            f"-- {shlex.join(program)} starts with an option, expected the program first: {command} -- train.py "
            f"{shlex.join(program)}"
        )
    return arguments, program


def set_program(program: Sequence[str], request: Request, command: Sequence[str]) -> None:
    """Make the job run the program that the user typed: `train.py --lr 3`, `-m package.train ...` or `any-command ...`.

    The program's arguments are added to job.args. If the job config already names a program, they replace job.args.
    Each ${key} in them is replaced by the value of that config key.

    Raise RequestError if the arguments contain keys of hpcinit, which the user probably meant to type before --. A
    second -- in front of the program turns this check off.

    command: the command line before --.
    """
    typed, given = program, program_arguments.given_keys(command)
    program = program_arguments.interpolated(program[program[0] == "--" :], request, given)
    config, document, job = request.config, request.document, request.config.job
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
    if "--" not in typed:
        program_arguments.refuse_own_keys(typed, request, command)
    document["name"] = config.name
    document["job"] |= {k: getattr(job, k) for k in ("script", "module", "command", "args")}


def _all(
    requests: Sequence[Request],
    argv: Sequence[str],
    jobs: list[tuple[Request, submission.Submitted]],
    runs: dict[int, Path],
    as_json: bool,
) -> int:
    """Submit the requests in order and add them to `jobs`. With wait=true, wait for the runs.

    Return the highest exit status.
    """
    if sweep.is_one(requests):
        return _sweep(requests, argv, runs, as_json)
    status = 0
    for number, request in enumerate(requests):
        if request.config.dry_run:
            messages.announce_script(request.combination, *submission.dry_run(request.config, argv), as_json)
            continue
        try:
            done = submission.submit(request, argv)
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
            end = f"interrupted, but the job was already submitted; to cancel it: hpcinit cancel {run}"
            print(f"{end}{_others(requests, number + 1)}", file=sys.stderr)
            return INTERRUPTED
        # Without a queue, the jobs of a sweep with wait=true run one after the other.
        if request.config.wait and not request.config.engine.has_queue:
            status = max(status, followed := _follow(request, done, as_json))
            if followed == INTERRUPTED:
                print(f"hpcinit: interrupted{_others(requests, number + 1)}", file=sys.stderr)
                return INTERRUPTED
    for request, done in jobs:
        if request.config.wait and request.config.engine.has_queue and status != INTERRUPTED:
            status = max(status, _follow(request, done, as_json))
    return status


def _sweep(requests: Sequence[Request], argv: Sequence[str], runs: dict[int, Path], as_json: bool) -> int:
    """Submit all requests as job arrays, and add the folders of the tasks to `runs`. Return the exit status."""
    config = requests[0].config
    if config.dry_run:
        for about, text, files in sweep.dry_run(requests, argv):
            messages.announce_script(about, text, files, as_json)
        return 0
    done = sweep.submit_all(requests, argv)
    runs.update({number: done.path / str(number) for number in done.ids})
    left = messages.announce_sweep(requests, done, as_json)
    if done.interrupted:
        run = shlex.quote(str(done.path))
        print(f"interrupted, but jobs were already submitted; to cancel them: hpcinit cancel {run}", file=sys.stderr)
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
    """Return a context that redirects the output for people to stderr if `as_json` is set.

    With --json, stdout is for programs.
    """
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _others(requests: Sequence[Request], number: int) -> str:
    """Return a note that the requests from `number` on were not submitted, or '' if there are none."""
    if len(requests) == 1 or number == len(requests):
        return ""
    if number == 0:
        return f"; none of the {len(requests)} combinations was submitted"
    return f"\nnot submitted: {'; '.join(request.combination for request in requests[number:])}"
