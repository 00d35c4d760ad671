"""`hpcinit doctor [cluster=x ...]` on the login node, with `nodes=N` as a job on the nodes themselves too.

Exit status: 0 where nothing is bad, 1 where something is, 2 for a request that is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from hpcinit.config import compose
from hpcinit.config.request import Request
from hpcinit.doctor import login, table
from hpcinit.facts import checkup
from hpcinit.facts.checkup import BAD, Check
from hpcinit.facts.errors import ConfigError, RequestError


def main(argv: Sequence[str]) -> int:
    """argv: overrides as for `hpcinit submit`, and options. Raises RequestError."""
    options = _parser().parse_args(argv)
    if wrong := [word for word in options.overrides if "=" not in word and not word.startswith("~")]:
        raise RequestError(f"{wrong[0]!r} is no override, expected KEY=VALUE as for hpcinit submit")
    try:
        [request] = _composed(options.overrides)
    except ConfigError as error:
        return _without_config(error, options)
    return _login(request, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hpcinit doctor", description="Is all well here, and on the nodes?")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for hpcinit submit")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("-q", "--quiet", action="store_true", help="only what is not well")
    return parser


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


def _show(checks: Sequence[Check], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(table.document(checks)))
    else:
        table.show(checks, quiet=options.quiet)
