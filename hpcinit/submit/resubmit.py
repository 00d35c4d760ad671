"""`hpcinit resubmit RUN [key=value ...]`: the same request once more, in a new run folder."""

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
from hpcinit.config.compose import Prepare, Request
from hpcinit.observe import find_runs, state
from hpcinit.records import run_folder
from hpcinit.submit import provenance, submit_command, transaction

# Of the earlier submission only: a job that was waited for is over, and who asks for one more does not ask for none.
RESET: dict[str, Any] = {"after": None, "after_ok": None, "again": False, "dry_run": False}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit resubmit", description="Submit the request of a run once more.")
    parser.add_argument("run", help="run folder, its name, or a job id")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what is to differ")
    find_runs.add_runs_dir(parser)
    parser.add_argument(
        "--fresh-code", action="store_true", help="of a run with snapshot=git: the checkout as it is now, not as it was"
    )
    return console.add_verbosity_options(parser, "one JSON object per job, for programs")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv), intermixed=True)
    run = find_runs.find_run(options.run, options.runs_dir).absolute()
    if foreign := safe_files.path_ownership_problems(
        run, f"look at it with hpcinit render {shlex.quote(str(run))}, and submit your own"
    ):
        raise RequestError(foreign)
    said = ["hpcinit", "resubmit", *argv]
    if (run / run_folder.SWEEP).is_file():
        return submit_command.submit_all(_failed(run, options.overrides), said, as_json=options.json)
    _refuse_what_goes_on(run, options.overrides)
    document = provenance.read_recorded(run)
    dropped = [key for key in ("after", "after_ok") if document.get(key)]
    document |= RESET
    _go_where_it_was_submitted(run, document, options.fresh_code)
    if dropped and not any(word.startswith(f"{key}=") for word in options.overrides for key in dropped):
        console.message(f"{' and '.join(dropped)} of {run.name} is left out; give it again to wait")

    def check(request: Request) -> None:
        transaction.check(request.config, request.document)

    def submit_all(requests: Sequence[Request]) -> int:
        return submit_command.submit_all(requests, said, as_json=options.json)

    return provenance.recorded_request(document, options.overrides, check, submit_all)


def _failed(run: Path, overrides: Sequence[str]) -> list[Request]:
    """The requests of a sweep's tasks that have not ended well, numbered anew. Raises RequestError if there is none."""
    requests: list[Request] = []

    def keep(combination: str, composed: Sequence[Request]) -> int:
        requests.append(replace(composed[0], number=len(requests), combination=combination))
        return 0

    combinations = find_runs.combinations(run)
    for number in find_runs.failed_tasks(run):
        document = provenance.read_recorded(run / str(number)) | RESET
        _go_where_it_was_submitted(run, document, False)
        check: Prepare = lambda request: transaction.check(request.config, request.document)  # noqa: E731
        provenance.recorded_request(document, overrides, check, partial(keep, combinations[number]))
    if not requests:
        raise RequestError(f"{run.name}: no task of this sweep has failed, there is nothing to submit again")
    return requests


def _refuse_what_goes_on(run: Path, overrides: Sequence[str]) -> None:
    now = state.read(run)
    known = not now.over and now.name != "UNKNOWN"
    if known and not any(word.startswith("again=") for word in overrides):
        raise RequestError(
            f"{run.name} is {now.name} as job {now.job_id}: again=true submits it a second time, "
            f"`hpcinit cancel {shlex.quote(run.name)}` ends the first"
        )


def _go_where_it_was_submitted(run: Path, document: dict[str, Any], fresh: bool) -> None:
    """Change into the folder that the request's relative paths begin at, or into the snapshot's copy of it."""
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
        raise RequestError(f"cannot enter {place}, where {run.name} ran: {error.strerror}; submit anew") from None
    if job["workdir"] is not None:
        job["workdir"] = str(place)
    if expanded(document["runs_dir"]).absolute() != run.parent:
        document["runs_dir"] = str(run.parent)
