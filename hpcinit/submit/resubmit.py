"""Implements `hpcinit resubmit RUN [key=value ...] [-- train.py ...]`: submits the same request again, as a new run."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcinit.base import console, safe_files
from hpcinit.base.errors import RequestError
from hpcinit.base.text import expanded
from hpcinit.checks import all_checks
from hpcinit.config.request import Prepare, Request
from hpcinit.observe import find_runs, resubmitted, state
from hpcinit.observe import requests as requests_of_runs
from hpcinit.records import run_folder
from hpcinit.submit import program_arguments, provenance, shell_variables, submit_command

# Keys of the first submission that a resubmission resets.
RESET: dict[str, Any] = {"dependency": None, "again": False, "dry_run": False}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit resubmit",
        usage="hpcinit resubmit [options] RUN [key=value ...] [-- PROGRAM ARGUMENTS ...]",
        description="Submit the request of a run again, in a new run folder. A program after -- replaces the old "
        "program and its arguments.",
    )
    parser.add_argument("run", help="run folder, its name, or a job id")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys to change")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--fresh-code", action="store_true", help="with snapshot=git: use the current checkout, not the old snapshot"
    )
    return console.add_verbosity_options(parser, "one JSON object per job, for programs")


def main(argv: Sequence[str]) -> int:
    arguments, program = submit_command.split_program(argv, "hpcinit resubmit RUN")
    options = console.parse_arguments(parser(), arguments, intermixed=True)
    run = find_runs.find_run(options.run, options.runs_dir).absolute()
    if foreign := safe_files.path_ownership_problems(
        run, f"read it with hpcinit render {shlex.quote(str(run))}, and submit your own"
    ):
        raise RequestError(foreign)
    command = ["hpcinit", "resubmit", *argv]
    if (run / run_folder.SWEEP).is_file():
        if program:
            raise RequestError(
                f"{run.name} is a sweep, and a program after -- would make its tasks identical: resubmit one task, as "
                f"in: hpcinit resubmit {shlex.quote(f'{options.run}/0')} -- {shlex.join(program)}"
            )
        failed = _failed(run, options.overrides)
        _show_other_variables(run, failed[0][1])
        return _submit_all(failed, command, options.json)
    _refuse_unfinished(run, options.overrides)
    document = provenance.read_recorded(run)
    dropped = document.get("dependency")
    document |= RESET
    _go_where_it_was_submitted(run, document, options.fresh_code)
    if dropped and not any(override.startswith("dependency=") for override in options.overrides):
        of_run = find_runs.name_of(run)
        console.message(
            f"the new run does not use dependency={dropped} of {of_run}; to wait for a job, add dependency=... again"
        )

    def check(request: Request) -> None:
        if program:
            submit_command.set_program(program, request, ["hpcinit", "resubmit", options.run, *options.overrides])
        all_checks.check(request.config, request.document)
        _show_other_variables(run, request)

    def submit_all(requests: Sequence[Request]) -> int:
        given = _given(run, options.overrides)
        return _submit_all([(run, replace(request, given=given)) for request in requests], command, options.json)

    return provenance.recorded_request(document, options.overrides, check, submit_all)


def _submit_all(requests: Sequence[tuple[Path, Request]], command: Sequence[str], as_json: bool) -> int:
    """Submit the requests. Record for each the run or task that it replaces."""
    made: dict[int, Path] = {}
    try:
        return submit_command.submit_all([request for _, request in requests], command, made, as_json)
    finally:
        for replaced, request in requests:
            if again := made.get(request.number):
                resubmitted.note(replaced, again)


def _given(run: Path, overrides: Sequence[str]) -> list[str]:
    """Return what the user typed before `--` to submit `run`. An override replaces the argument with the same key."""
    changed = program_arguments.given_keys(overrides)
    typed = requests_of_runs.read(run).typed
    return [*(word for word in typed if not program_arguments.given_keys([word]) & changed), *overrides]


def _failed(run: Path, overrides: Sequence[str]) -> list[tuple[Path, Request]]:
    """Return the failed tasks of a sweep with their requests, numbered from 0. Raise RequestError if no task failed."""
    failed: list[tuple[Path, Request]] = []

    def keep(task: find_runs.Task, composed: Sequence[Request]) -> int:
        request = replace(composed[0], number=len(failed), combination=task.combination, parameters=task.given)
        original = run / str(task.number)
        failed.append((original, replace(request, given=_given(original, overrides))))
        return 0

    for task in find_runs.failed_tasks(run):
        document = provenance.read_recorded(run / str(task.number)) | RESET
        _go_where_it_was_submitted(run, document, False)
        check: Prepare = lambda request: all_checks.check(request.config, request.document)  # noqa: E731
        provenance.recorded_request(document, overrides, check, partial(keep, task))
    if not failed:
        raise RequestError(f"no task of the sweep {run.name} has failed, so there is nothing to submit again")
    return failed


def _refuse_unfinished(run: Path, overrides: Sequence[str]) -> None:
    """Raise RequestError if the run, or the last run that replaced it, is in the queue."""
    last = resubmitted.newest(run)
    now = state.read(last)
    name, end = find_runs.name_of(run), find_runs.name_of(last)
    known = not now.over and now.name != "UNKNOWN"
    if known and not any(override.startswith("again=") for override in overrides):
        who = name if last == run else f"{name} was submitted again as {end}, which"
        raise RequestError(
            f"{who} is still {now.name} as job {now.job_id}: to submit it a second time add again=true; to cancel "
            f"the first: hpcinit cancel {shlex.quote(end)}"
        )


def _show_other_variables(run: Path, request: Request) -> None:
    """Print which shell variables differ from the first submission, if that submission recorded them."""
    recorded = provenance.recorded_provenance(run).get("variables")
    if isinstance(recorded, list) and (
        text := shell_variables.differences(find_runs.name_of(run), recorded, request.config)
    ):
        console.message(text)


def _go_where_it_was_submitted(run: Path, document: dict[str, Any], fresh: bool) -> None:
    """Change to the folder in which the run started, or to its copy in the code snapshot.

    Adapt the paths in `document`.
    """
    known, job = provenance.recorded_provenance(run), document["job"]
    place = Path(known["workdir"])
    code = known.get("snapshot")
    if document.get("snapshot") == "git" and code and not fresh:
        place = run / run_folder.CODE / code["workdir"]
        if job["script"] and Path(job["script"]).is_relative_to(code["root"]):
            job["script"] = str(run / run_folder.CODE / Path(job["script"]).relative_to(code["root"]))
    try:
        os.chdir(place)
    except OSError as error:
        raise RequestError(
            f"cannot enter {place}, where {find_runs.name_of(run)} ran: {error.strerror}; submit a new run with "
            "hpcinit submit"
        ) from None
    if job["workdir"] is not None:
        job["workdir"] = str(place)
    if expanded(document["runs_dir"]).absolute() != (above := (resubmitted.sweep_of(run) or run).parent):
        document["runs_dir"] = str(above)
