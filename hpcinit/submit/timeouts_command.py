"""Implements `hpcinit timeouts [OVERRIDES...]`: prints the start-up timeout that a job with these settings has."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hpcinit.base import console, json_output
from hpcinit.base.errors import RequestError

NODES = tuple(2**power for power in range(15))  # 1 to 16384


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcinit timeouts", description="Print the start-up timeout of a job with these settings."
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for hpcinit submit: cluster=x nodes=8")
    return console.add_verbosity_options(parser)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status. Raise RequestError or ConfigError if the request is wrong."""
    options = console.parse_arguments(parser(), list(argv), intermixed=True)
    from hpcinit.config import compose, job_spec, overrides  # noqa: PLC0415

    if wrong := overrides.not_overrides(options.overrides):
        raise RequestError(f"{wrong[0]!r} is not an override: expected KEY=VALUE such as cluster=x")
    config = compose.compose(options.overrides)
    formula, sources = job_spec.startup_timeout(config), job_spec.timeout_sources(config)
    seconds = {nodes: formula.start_up(nodes).total_seconds() for nodes in NODES}
    if options.json:
        values = {name: {"value": value, "from": source} for name, (value, source) in sources.items()}
        print(json_output.line("timeouts", {"formula": values, "start_up_s": seconds}))
        return 0
    if options.quiet:
        print(f"{formula.start_up(config.nodes).total_seconds():g}")
        return 0
    print(f"start_up = {formula.text(config.nodes)}, but at most the job's remaining time minus 30 s\n")
    for name, (value, source) in sources.items():
        print(f"  {name:10} {value:8g}   {source}")
    print("\n  nodes  seconds")
    for nodes, each in seconds.items():
        print(f"  {nodes:5}  {each:7g}")
    return 0
