"""`python -m hpcinit.run SPEC | script.py args... | -m module args... | command args...`

Inside a job, once per rank: read the world, export torch's variables, run the program unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcinit.cli import guarded
from hpcinit.facts import launchers, runfolder
from hpcinit.facts.errors import RequestError
from hpcinit.facts.spec import Program, Spec, load, of_this_run
from hpcinit.runtime import program


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if argv else 2
    spec = _spec(argv)
    what = spec.program if spec else _program(list(argv))
    world = launchers.read(os.environ)
    if world.rank == 0:
        for warning in world.warnings:
            print(f"hpcinit: warning: {warning}", file=sys.stderr, flush=True)
    status = program.run(what, world, of_this_run(os.environ, world.world_size)[0])
    program.end(status)
    return status


def _spec(argv: Sequence[str]) -> Spec | None:
    if argv[0].endswith(".json") and len(argv) == 1:
        path = Path(argv[0]).absolute()
        spec = load(path)
        os.environ[runfolder.ENV_FOLDER] = str(path.parent)
        try:
            os.chdir(spec.workdir)
        except OSError as error:
            raise RequestError(f"cannot enter the working folder {spec.workdir}: {error.strerror}") from None
        return spec
    return None


def _program(words: list[str]) -> Program:
    if words[0] == "-m":
        if len(words) == 1:
            raise RequestError("-m names no module, expected: -m package.module args...")
        return Program("module", words[1], tuple(words[2:]))
    kind = "script" if words[0].endswith(".py") else "command"
    return Program(kind, words[0], tuple(words[1:]))


if __name__ == "__main__":
    sys.exit(guarded("hpcinit.run", sys.argv[1:]))
