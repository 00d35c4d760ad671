"""Programs that start ranks themselves, in the place of a rank: with torchrun there, each rank is a training."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

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
    """A message where the program would start further ranks in each of ours."""
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
