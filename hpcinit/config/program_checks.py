"""Whether the program exists, and whether it is a launcher that would start further ranks in each rank."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from hpcinit.base.text import expanded
from hpcinit.config.partition import ranks_per_node
from hpcinit.config.schema import Config

PYTHON = re.compile(r"python[\d.]*")
OF_SLURM = ("srun", "sbatch", "salloc")  # srun in a step waits for cores that the step itself has, for ever
OF_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "horovodrun")
OF_TORCH = ("torchrun", "deepspeed", "accelerate")
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
# With these they are told of the other nodes, and one on each node makes one training.
OF_SEVERAL_NODES = re.compile(r"--(nnodes|num[-_]machines|num[-_]nodes|hostfile|node[-_]rank)\b")


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
    yield from _nested_launcher(config)


def _close(path: Path) -> str:
    """'; did you mean train.py?', of the programs in that folder."""
    near = difflib.get_close_matches(path.name, [one.name for one in path.parent.glob("*.py")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _for_python(command: str, args: Sequence[str], workdir: Path) -> Iterator[str]:
    """`-- python trian.py`: Python's first argument, if it looks like a file; /a/path may be on the nodes only."""
    first = next(iter(args), "")
    path = (workdir / first).absolute()
    if PYTHON.fullmatch(Path(command).name) and first.endswith(".py") and not (first[0] == "/" or path.is_file()):
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


def _nested_launcher(config: Config) -> Iterator[str]:
    """Yield a message if the program would start further ranks in each of ours."""
    job = config.job
    said, starter, args = _starter(job.command, job.module, list(job.args))
    ranks = ranks_per_node(config)
    alone = config.nodes * ranks == 1 or (ranks == 1 and any(map(OF_SEVERAL_NODES.match, args)))
    if not starter or (alone and starter not in OF_SLURM):
        return
    agents = "" if starter in OF_SLURM + OF_MPI else "; launch=torchrun has agents of torchrun"
    what = "would wait for ever for nodes that the job has" if starter in OF_SLURM else "would be a training of its own"
    yield (
        f"{said}, which starts ranks itself; hpcinit has started them already, {config.nodes} nodes x {ranks}, and "
        f"each {what}: {_alone(args)}{agents}"
    )


def _starter(command: str | None, module: str | None, args: Sequence[str]) -> tuple[str, str, Sequence[str]]:
    """(as it was given, its name or '', its arguments)"""
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
    """'give it the program alone, -- train.py --lr 3', of what stands behind the starter."""
    at = next((at for at, word in enumerate(args) if word.endswith(".py")), None)
    program = ["train.py"] if at is None else args[at:]
    return f"give the program alone, -- {shlex.join(program)}"
