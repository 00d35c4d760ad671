"""The settings of a submission that the job reads, stored as JSON in `spec.json` in the run folder.

JSON is safer than a pickle: another version of Python can read it, and it contains no code that another user could run
as you.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files
from hpcinit.base.errors import RequestError, SpecError
from hpcinit.records import run_folder, wrappers
from hpcinit.records.batch import Batch, solve
from hpcinit.records.components import Component, ranks, ranks_in_a_row
from hpcinit.records.layout import Layout
from hpcinit.records.starts import STARTS
from hpcinit.records.startup_timeout import CHECKPOINT_S, StartupTimeout
from hpcinit.records.stop_reasons import Stopping
from hpcinit.records.wrappers import Wrapper

FORMAT = 1
KINDS = ("script", "module", "command")
DEVICE_ID = ("never", "auto", "always")
SEED_BY = ("same", "rank", "data")
PARAM = ("fp32", "bf16", "fp16")
REDUCE = ("fp32", "bf16")
HANG_ACTIONS = ("report", "end")
CHECKPOINTING = ("none", "full")
WANDB, MLFLOW = TRACKERS = ("wandb", "mlflow")
OFF, REPORT, REPLACE = NODE_CHECKS = ("off", "report", "replace")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"{key} is {value!r}, expected one of: {', '.join(choices)}")


@dataclass(frozen=True)
class Program:
    """The program that the ranks run.

    kind: script (a .py file), module (as in `python -m`) or command (any command line).
    """

    kind: str
    target: str
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("program.kind", self.kind, KINDS)


@dataclass(frozen=True)
class Comm:
    """How the process group is created.

    backend: torch's backend. With 'auto', hpcinit chooses the backend by the device.
    collective_timeout_s: the timeout of collectives. None: torch's default.
    host_template: how to rename hosts, see rename_host().
    device_id: whether to pass the rank's device to init_process_group: 'never', 'auto' or 'always'. If it is passed,
        NCCL connects at once.
    checkpoint_timeout_s: how long ranks wait for each other in run.save and run.load.
    """

    backend: str = "auto"
    deepspeed: bool = False
    timeout: StartupTimeout = field(default_factory=StartupTimeout)
    collective_timeout_s: float | None = None
    host_template: str = ""
    device_id: str = "never"
    checkpoint_timeout_s: float = CHECKPOINT_S

    def __post_init__(self) -> None:
        one_of("comm.device_id", self.device_id, DEVICE_ID)


@dataclass(frozen=True)
class Samples:
    """The batch sizes that the user requested. A size is None if the user did not set it.

    Attributes:
        micro: samples per forward pass of a rank.
        accumulation: forward passes per step.
        total: samples per step over all ranks, the global batch.
    """

    micro: int | None = None
    accumulation: int | None = None
    total: int | None = None

    def over(self, data_parallel: int) -> Batch:
        """Compute the missing sizes and return the Batch. Raise RequestError if there is no solution.

        Args:
            data_parallel: the number of data parallel ranks.
        """
        return solve(self.micro, self.accumulation, self.total, data_parallel)


@dataclass(frozen=True)
class Precision:
    """The number formats that training uses: 'fp32', 'bf16' or 'fp16'.

    Attributes:
        param: format of the parameters in forward and backward.
        reduce: format of the gradients while they are summed over ranks: 'fp32' or 'bf16'.
    """

    param: str = "fp32"
    reduce: str = "fp32"

    def __post_init__(self) -> None:
        one_of("precision.param", self.param, PARAM)
        one_of("precision.reduce", self.reduce, REDUCE)


@dataclass(frozen=True)
class Training:
    """How run.wrap prepares a model for training.

    Attributes:
        wrap: 'ddp', 'fsdp', 'deepspeed' or 'none'.
        precision: number formats of parameters and gradients.
        activation_checkpointing: 'none', or 'full' to recompute each layer in the backward pass.
        compile: whether to compile the model with torch.compile.
        gradient_clip: the maximum norm of the gradients; 0: no limit.
        deepspeed: the values of the config keys that start with `deepspeed.`; see deepspeed_config.options().
    """

    wrap: str = "ddp"
    precision: Precision = field(default_factory=Precision)
    activation_checkpointing: str = "none"
    compile: bool = False
    gradient_clip: float = 0.0
    deepspeed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrappers.get(self.wrap)
        one_of("activation_checkpointing", self.activation_checkpointing, CHECKPOINTING)

    @property
    def wrapper(self) -> Wrapper:
        """Return the object that describes the wrapper named by `wrap`."""
        return wrappers.get(self.wrap)


@dataclass(frozen=True)
class Hang:
    """The settings of hang detection.

    after_s: how many seconds without a training step count as a hang. 0: disabled.
    action: 'report' (only report the hang) or 'end' (report it, then end the ranks).
    """

    after_s: float = 240.0  # less than torch's collective timeout (600 s), whose error does not name the missing rank
    action: str = "report"

    def __post_init__(self) -> None:
        one_of("hang.action", self.action, HANG_ACTIONS)


@dataclass(frozen=True)
class NodeCheck:
    """The settings of the check that runs on each node before its ranks start.

    action: 'off', 'report', or 'replace', which reports and replaces a faulty node.
    timeout_s: the maximum time that the ranks wait for the check.
    """

    action: str = REPORT
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        one_of("check_node.action", self.action, NODE_CHECKS)


@dataclass(frozen=True)
class Launch:
    """How the ranks are started.

    kind: 'srun', 'fork' or 'torchrun'. With 'srun', srun starts each rank. Otherwise, srun starts one process per node,
        and that process starts the node's ranks.
    preload: modules to import before the fork.
    max_restarts: how often torchrun's agents may restart the ranks.
    wait_s: how long the other ranks may run after the first rank exits. None or 0: forever.
    cpus: the number of CPUs per rank, if set.
    cpu_bind, gpu_bind: options for srun if each rank is a task of srun. None: the site's default.
    warm, without_progress: the settings restart.warm and restart.without_progress.
    spares: the number of spare nodes that also have a fork server.
    """

    kind: str = "srun"
    preload: tuple[str, ...] = ()
    max_restarts: int = 0
    kill_on_bad_exit: bool = True
    wait_s: int | None = 0
    cpus: int | None = None
    cpu_bind: str | None = None
    gpu_bind: str | None = None
    warm: bool = False
    spares: int = 0
    without_progress: int | None = 2

    def __post_init__(self) -> None:
        one_of("launch.kind", self.kind, tuple(STARTS))


@dataclass(frozen=True)
class Spec:
    """The settings of a submission that the job needs.

    nonce: a random secret, the same on every rank. Other jobs can't know it.
    workdir: the folder in which the user's code runs.
    seed_by: 'same' (all ranks get the same seed), 'rank' (each rank gets its own), or 'data' (ranks with different data
        get different seeds).
    components: the components of a heterogeneous job, or () for any other job. In a heterogeneous job, `nodes` is the
        total number of nodes, and ranks_per_node is the number in the first component.
    """

    name: str
    cluster: str
    nodes: int
    ranks_per_node: int
    program: Program
    workdir: str
    nonce: str
    seed: int = 0
    layout: Layout = field(default_factory=Layout)
    comm: Comm = field(default_factory=Comm)
    seed_by: str = "same"
    deterministic: bool = False
    batch: Samples = field(default_factory=Samples)
    training: Training = field(default_factory=Training)
    stop: Stopping = field(default_factory=Stopping)
    hang: Hang = field(default_factory=Hang)
    check_node: NodeCheck = field(default_factory=NodeCheck)
    launch: Launch = field(default_factory=Launch)
    tracker: str | None = None
    components: tuple[Component, ...] = ()

    def __post_init__(self) -> None:
        one_of("seed_by", self.seed_by, SEED_BY)

    @property
    def world_size(self) -> int:
        return ranks(self.parts)

    @property
    def parts(self) -> tuple[Component, ...]:
        """Return the components of the job. An ordinary job has exactly one."""
        return self.components or (Component(self.nodes, self.ranks_per_node),)

    @property
    def ranks_in_a_row(self) -> int:
        return ranks_in_a_row(self.parts)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    def shown(self) -> str:
        """Return the spec as JSON for a run that is not submitted yet.

        The nonce in it is a placeholder, because the real one is created at submission.
        """
        return replace(self, nonce="random").to_json()

    def command(self) -> list[str]:
        """Return the program with its arguments, as in submission.json."""
        return [self.program.target, *self.program.args]


def load(path: Path, to_run: bool = True) -> Spec:
    """Read the Spec in `path`. Raise SpecError if this version of hpcinit cannot use it.

    to_run: True if this process will run the program in the spec. The file must then belong to this user, and no other
        user may be able to write it. False to read a colleague's run.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if to_run and (problem := safe_files.ownership_problem(path, os.fstat(file.fileno()), "submit again")):
                raise SpecError(problem)
            document = json.load(file)
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror}. Is the run folder on a file system that all nodes share?",
            quoted=error.strerror or "",
        ) from None
    except ValueError as error:
        raise SpecError(f"{path} is not JSON ({error}); submit again") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise SpecError(
            f"{path} does not have format {FORMAT}: the job and the submission use different versions of hpcinit; "
            "use the same environment for both"
        )
    try:
        return run_folder.from_fields(Spec, document)
    except (AttributeError, TypeError, ValueError, RequestError) as error:
        raise SpecError(f"{path} does not contain a spec: {error}; submit again") from None


def ranks_per_task(folder: Path) -> int:
    """Return how many ranks each srun task of this run starts, or 1 if the run's spec cannot be read."""
    try:
        spec = load(folder / run_folder.SPEC, to_run=False)
    except SpecError:
        return 1
    return STARTS[spec.launch.kind].ranks_per_task(spec.ranks_per_node)


def of_this_run(env: Mapping[str, str], world_size: int) -> tuple[Spec, Path] | tuple[None, None]:
    """Return the spec and the folder of the run to which this process belongs, or (None, None) if there is none.

    A process with another world size is not a rank of the run, for example if the user ran srun inside the job. The
    run's settings do not apply to it, so return (None, None).
    """
    folder = env.get(run_folder.ENV_FOLDER)
    if not folder:
        return None, None
    spec = load(Path(folder) / run_folder.SPEC)
    return (spec, Path(folder)) if spec.world_size == world_size else (None, None)
