"""Checks of the program: that it exists, and that it is not a launcher, which would start more ranks in each rank."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from hpcinit.base.text import expanded
from hpcinit.config.program_source import PYTHON
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config

OF_SLURM = ("srun", "sbatch", "salloc")  # srun in a step waits forever for cores that the step itself uses
OF_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "horovodrun")
OF_TORCH = ("torchrun", "deepspeed", "accelerate")
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
# With these options a launcher knows about the other nodes, and one launcher per node makes one training run.
OF_SEVERAL_NODES = re.compile(r"--(nnodes|num[-_]machines|num[-_]nodes|hostfile|node[-_]rank)\b")


def problems(config: Config) -> Iterator[str]:
    """Yield a message unless exactly one of script, module and command is set, and for each file that is missing."""
    job = config.job
    given = [name for name in ("script", "module", "command") if getattr(job, name)]
    if len(given) != 1:
        yield (
            f"job has {' and '.join(given) or 'none of script, module, command'}, expected exactly one: set "
            "job=NAME, or put the program after --, as in: hpcinit submit nodes=2 -- train.py"
        )
        return
    workdir = expanded(job.workdir or ".")
    if not workdir.is_dir():
        yield f"job.workdir is {str(workdir)!r}, expected a folder that exists"
    elif job.script and not (workdir / job.script).is_file():
        path = (workdir / job.script).absolute()
        yield f"the program (job.script) is {job.script!r}, expected a file: {path} does not exist{_close(path)}"
    elif job.command:
        yield from _command(job.command, workdir)
        if not config.container.image:  # the file may be in the image
            yield from _for_python(job.command, job.args, workdir)
    yield from _nested_launcher(config)


def _close(path: Path) -> str:
    """Return '; did you mean train.py?' for a similar name in the same folder, or ''."""
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*.py")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _for_python(command: str, args: Sequence[str], workdir: Path) -> Iterator[str]:
    """Check the first argument of Python, as in `-- python trian.py`. An absolute path may exist only on the nodes."""
    first = next(iter(args), "")
    path = (workdir / first).absolute()
    if PYTHON.fullmatch(Path(command).name) and first.endswith(".py") and not (first[0] == "/" or path.is_file()):
        yield f"job.args has {first!r}, expected a file: {path} does not exist{_close(path)}"


def _command(command: str, workdir: Path) -> Iterator[str]:
    """Check a command that is a path. A bare name is found on the PATH of the nodes, which may differ from ours."""
    path = workdir / command
    if "/" not in command and command not in {".", ".."}:
        if path.is_file() and shutil.which(command) is None:
            how = f"./{command}" if os.access(path, os.X_OK) else f"bash {command}"
            yield f"job.command is {command!r}, which is not on PATH; to run {path.absolute()}: -- {how}"
        return
    if not path.exists():
        why = "does not exist"
    elif path.is_dir():
        why = "is a folder"
    elif not os.access(path, os.X_OK):
        why = f"is not executable; run chmod +x on it, or name its interpreter, as in: -- bash {command}"
    else:
        return
    yield f"job.command is {command!r}, expected an executable file: {path.absolute()} {why}"


def _nested_launcher(config: Config) -> Iterator[str]:
    """Yield a message if the program is a launcher that would start more ranks in each rank."""
    job = config.job
    given, starter, args = _starter(job.command, job.module, list(job.args))
    ranks = ranks_per_node(config)
    alone = config.nodes * ranks == 1 or (ranks == 1 and any(map(OF_SEVERAL_NODES.match, args)))
    if not starter or (alone and starter not in OF_SLURM):
        return
    agents = "" if starter in OF_SLURM + OF_MPI else "; to use torchrun's agents: launch=torchrun"
    what = (
        "would wait forever for nodes that the job uses" if starter in OF_SLURM else "would be a separate training run"
    )
    yield (
        f"{given}: it starts its own ranks, but hpcinit already starts one process per rank "
        f"({config.nodes} node{'s' * (config.nodes != 1)} x {ranks}), so every rank {what}. {_alone(args)}{agents}"
    )


def _starter(command: str | None, module: str | None, args: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """Return the program as it was given, the launcher's name or '', and its arguments."""
    name = PurePath(command or "").name
    if PYTHON.fullmatch(name) and "-m" in args[:2]:
        at = args.index("-m") + 1
        module, args = "".join(args[at : at + 1]), args[at + 1 :]
        return f"job.command is '{name} -m {module}'", MODULES.get(module, ""), args
    if module:
        return f"job.module is {module!r}", MODULES.get(module, ""), args
    known = name in OF_SLURM + OF_MPI + OF_TORCH and not (name == "accelerate" and args[:1] != ["launch"])
    return f"job.command is {name!r}", name if known else "", args


def _alone(args: Sequence[str]) -> str:
    """Return 'Submit the program itself: -- train.py --lr 3' for the arguments of a launcher."""
    at = next((at for at, argument in enumerate(args) if argument.endswith(".py")), None)
    program = ["train.py"] if at is None else args[at:]
    return f"Submit the program itself: -- {shlex.join(program)}"
