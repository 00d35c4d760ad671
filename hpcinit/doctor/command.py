"""`hpcinit doctor [cluster=x ...]` on the login node, with `nodes=N` as a job on the nodes themselves too.

Exit status: 0 where nothing is bad, 1 where something is, 2 for a request that is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from hpcinit.config import compose, overrides
from hpcinit.config.compose import Request
from hpcinit.doctor import job, login, table
from hpcinit.facts import checkup, telling
from hpcinit.facts.checkup import BAD, Check
from hpcinit.facts.errors import ConfigError, RequestError
from hpcinit.observe import find


def main(argv: Sequence[str]) -> int:
    """argv: overrides as for `hpcinit submit`, and options. Raises RequestError."""
    options = telling.parsed(parser(), list(argv))
    if wrong := overrides.not_overrides(options.overrides):
        raise RequestError(f"{wrong[0]!r} is no override, expected KEY=VALUE as for hpcinit submit")
    if options.run:
        if options.overrides:
            raise RequestError(f"--run {options.run} is over or goes on: {options.overrides[0]} changes nothing in it")
        return _of_run(find.find(options.run, options.runs_dir), options)
    on_nodes = any(word.lstrip("+").startswith("nodes=") for word in options.overrides)
    if options.remember and not on_nodes:
        raise RequestError("--remember needs what the nodes say: hpcinit doctor nodes=N ..., or --run RUN")
    asked = job.overrides(options.overrides) if on_nodes else options.overrides
    try:
        [request] = _composed(asked)
    except ConfigError as error:
        return _without_config(error, options)
    return _on_nodes(request, argv, options) if on_nodes else _login(request, options)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit doctor", description="Is all well here, and on the nodes?")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for hpcinit submit; nodes=N: as a job")
    parser.add_argument("--remember", action="store_true", help="leave nodes that are bad out of later submissions")
    parser.add_argument("--run", metavar="RUN", help="what an earlier one has found: its folder, name or job id")
    find.add_runs_dir(parser)
    return telling.options(parser)


def _composed(overrides: Sequence[str]) -> Sequence[Request]:
    found: list[Request] = []

    def keep(requests: Sequence[Request]) -> int:
        found.extend(requests)
        return 0

    compose.main(overrides, lambda _: None, keep)
    return found


def _without_config(error: ConfigError, options: argparse.Namespace) -> int:
    """What can be said all the same."""
    wrong = [Check("config", BAD, problem) for problem in error.problems]
    _show([*login.of_versions(None), *wrong], options)
    return error.exit_status


def _login(request: Request, options: argparse.Namespace) -> int:
    checks = list(login.checks(request.config, request.document, os.environ))
    _show(checks, options)
    return int(checkup.worst(checks) == BAD)


def _on_nodes(request: Request, argv: Sequence[str], options: argparse.Namespace) -> int:
    """The login node first: where that is not well, nothing is submitted."""
    here = list(login.checks(request.config, request.document, os.environ))
    if checkup.worst(here) == BAD:
        telling.message("what is bad here keeps the doctor's job from being submitted")
        _show(here, options)
        return 1
    status, path = job.submit(request, argv)
    if path is None:
        return status
    if waited := job.wait(path):
        return waited
    return _of_run(path, options, here)


def _of_run(path: Path, options: argparse.Namespace, before: Sequence[Check] = ()) -> int:
    found, reports = job.checks(path)
    every = [*before, *found]
    if options.json:
        print(json.dumps(table.document(every) | job.document(path, reports)))
    else:
        if not options.quiet:
            table.show_ranks(reports)
        table.show(every, quiet=options.quiet)
    for line in job.remember(path, found) if options.remember else _hint(found, path):
        telling.note(line)
    return int(checkup.worst(every) == BAD)


def _hint(found: Sequence[Check], path: Path) -> list[str]:
    blamed = sorted({host for check in found if check.grade == BAD for host in check.hosts})
    run = shlex.quote(str(path))
    return [f"leave {', '.join(blamed)} out from now on:  hpcinit doctor --remember --run {run}"] if blamed else []


def _show(checks: Sequence[Check], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(table.document(checks)))
    else:
        table.show(checks, quiet=options.quiet)
