"""Implements `python -m hpcinit.world`: prints what hpcinit reads from the environment, as one JSON object."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from hpcinit.base import console, json_output
from hpcinit.cli.main import guarded
from hpcinit.world import launchers


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcinit.world",
        description="Print rank, sizes and hosts of this process as one JSON object, or an error with exit status 2.",
    )
    parser.add_argument(
        "--started-by",
        metavar="LAUNCHER",
        help="use this launcher's variables instead of detecting it: " + ", ".join(m.NAME for m in launchers.LAUNCHERS),
    )
    return console.add_verbosity_options(parser, "accepted, but the output is always JSON")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    world = launchers.read(os.environ, options.started_by)
    # World.node_count is 0 if the launcher names the nodes.
    print(json_output.line("world", asdict(world) | {"node_count": world.nodes}))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.world.__main__", sys.argv[1:]))
