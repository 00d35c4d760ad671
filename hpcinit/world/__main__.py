"""`python -m hpcinit.world`: what hpcinit makes of the environment it stands in, as one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from hpcinit.base import console
from hpcinit.cli.main import guarded
from hpcinit.world import launchers


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcinit.world",
        description="Which rank am I: one JSON object on stdout, or a message and exit status 2.",
    )
    parser.add_argument("--launcher", help="choose by hand: " + ", ".join(m.NAME for m in launchers.LAUNCHERS))
    return console.add_verbosity_options(parser, "it is JSON in any case")


def main(argv: Sequence[str]) -> int:
    options = console.parse_arguments(parser(), list(argv))
    world = launchers.read(os.environ, options.launcher)
    # node_count is the launcher's own count, 0 where it names the nodes instead; whoever reads this wants the number.
    print(json.dumps(asdict(world) | {"node_count": world.nodes}))
    return 0


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.world.__main__", sys.argv[1:]))
