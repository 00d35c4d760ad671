"""Whether what the ranks are to run is there."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcinit.config import starters
from hpcinit.config.schema import Config
from hpcinit.facts.user_paths import expanded


def problems(config: Config) -> Iterator[str]:
    """One message if it is not exactly one of script, module and command, or no file where its name is a path."""
    job = config.job
    given = [name for name in ("script", "module", "command") if getattr(job, name)]
    if len(given) != 1:
        yield (
            f"job has {' and '.join(given) or 'none of script, module, command'}, expected exactly one: choose "
            "job=NAME, or put the program after --, as in: hpcinit submit nodes=2 -- train.py"
        )
        return
    workdir = expanded(job.workdir or ".")
    if not workdir.is_dir():
        yield f"job.workdir is {str(workdir)!r}, expected a folder that exists"
    elif job.script and not (workdir / job.script).is_file():
        path = (workdir / job.script).absolute()
        yield f"job.script is {job.script!r}, expected a file: {path} does not exist{_close(path)}"
    elif job.command:
        yield from _command(job.command, workdir)
        if not config.container.image:  # which may have the file
            yield from _for_python(job.command, job.args, workdir)
    yield from starters.problems(config)


def _close(path: Path) -> str:
    """'; did you mean train.py?', of the programs in that folder."""
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*.py")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _for_python(command: str, args: Sequence[str], workdir: Path) -> Iterator[str]:
    """`-- python trian.py`: Python's first argument, if it looks like a file; /a/path may be on the nodes only."""
    first = next(iter(args), "")
    path = (workdir / first).absolute()
    if (
        starters.PYTHON.fullmatch(Path(command).name)
        and first.endswith(".py")
        and not (first[0] == "/" or path.is_file())
    ):
        yield f"job.args has {first!r}, expected a file: {path} does not exist{_close(path)}"


def _command(command: str, workdir: Path) -> Iterator[str]:
    """A bare name is looked up on the PATH of the nodes, which this one need not have."""
    path = workdir / command
    if "/" not in command and command not in {".", ".."}:
        if path.is_file() and shutil.which(command) is None:
            how = f"./{command}" if os.access(path, os.X_OK) else f"bash {command}"
            yield f"job.command is {command!r}, which is looked up on PATH; for {path.absolute()}: -- {how}"
        return
    if not path.exists():
        why = "does not exist"
    elif path.is_dir():
        why = "is a folder"
    elif not os.access(path, os.X_OK):
        why = f"may not be executed; chmod +x it, or name what runs it, as in: -- bash {command}"
    else:
        return
    yield f"job.command is {command!r}, expected an executable file: {path.absolute()} {why}"
