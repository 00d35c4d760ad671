"""The part of a request that the job reads: the JSON file `spec.json` in the run folder.

It is not a pickle. Another Python on another machine reads it hours later, and anyone who can write a pickle in a
shared folder could run code as you.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

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
OFF, REPORT, REPLACE = NODE_CHECKS = ("off", "report", "replace")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"{key} is {value!r}, expected one of: {', '.join(choices)}")


@dataclass(frozen=True)
class Program:
    """The program that the ranks run. kind: script (a .py file), module (as `python -m`) or command (any argv)."""

    kind: str
    target: str
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("program.kind", self.kind, KINDS)


@dataclass(frozen=True)
class Comm:
    """How the process group is created.

    backend: 'auto' chooses by the device. collective_timeout_s: None means torch's own. host_template: see
    rename_host(). device_id: whether torch gets the device ('never', 'auto', 'always'); then NCCL starts at once.
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
    """The requested batch sizes; None if not set.

    Attributes:
        micro: samples per forward pass of a rank.
        accumulation: forward passes per step.
        total: samples per step over all ranks, the global batch.
    """

    micro: int | None = None
    accumulation: int | None = None
    total: int | None = None

    def over(self, data_parallel: int) -> Batch:
        """Return the Batch. Raise RequestError if the sizes do not fit.

        Args:
            data_parallel: the number of data parallel ranks.
        """
        return solve(self.micro, self.accumulation, self.total, data_parallel)


@dataclass(frozen=True)
class Precision:
    """Number formats: 'fp32', 'bf16' or 'fp16'.

    Attributes:
        param: format of the parameters in forward and backward.
        reduce: format of gradients while they are summed over ranks: 'fp32' or 'bf16'.
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
        deepspeed: the config keys of `deepspeed.`, for deepspeed_config.options().
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
        """Return the object that `wrap` names."""
        return wrappers.get(self.wrap)


@dataclass(frozen=True)
class Hang:
    """Hang detection. after_s: seconds without a step; 0: disabled. action: 'report', or 'end': also end the ranks."""

    after_s: float = 240.0  # less than torch's 600 s of collectives, whose error does not name the missing rank
    action: str = "report"

    def __post_init__(self) -> None:
        one_of("hang.action", self.action, HANG_ACTIONS)


@dataclass(frozen=True)
class NodeCheck:
    """The check of each node before its ranks start.

    action: 'off', 'report', or 'replace' to also replace the node. timeout_s: the ranks wait no longer than this.
    """

    action: str = REPORT
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        one_of("check_node.action", self.action, NODE_CHECKS)


@dataclass(frozen=True)
class Launch:
    """How the ranks are started.

    kind: 'srun' starts each rank. With 'fork' and 'torchrun', srun starts one process per node, which starts the node's
    ranks. preload: modules to import before the fork. max_restarts: how often torchrun's agents restart the ranks.
    wait_s: how long ranks may run after the first has exited; None or 0: forever. cpus: per rank, if set. cpu_bind,
    gpu_bind: srun's options for one task per rank, or None for the site's default. warm, without_progress: restart.warm
    and restart.without_progress. spares: nodes beside those of the ranks that have a fork server, too.
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
    """The part of a submission that the job needs.

    nonce: random, the same on every rank, and secret from other jobs. workdir: where the user's code runs. seed_by:
    'same' on all ranks, different for each 'rank', or different for ranks with different 'data'. components: those of a
    heterogeneous job with one world, else (). Then `nodes` counts the nodes of all, and ranks_per_node is that of the
    first.
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
    components: tuple[Component, ...] = ()

    def __post_init__(self) -> None:
        one_of("seed_by", self.seed_by, SEED_BY)

    @property
    def world_size(self) -> int:
        return ranks(self.parts)

    @property
    def parts(self) -> tuple[Component, ...]:
        """Return the components. An ordinary job has one."""
        return self.components or (Component(self.nodes, self.ranks_per_node),)

    @property
    def ranks_in_a_row(self) -> int:
        return ranks_in_a_row(self.parts)

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    def shown(self) -> str:
        """Return to_json() for a run that does not exist yet. The real nonce is made at submission."""
        return replace(self, nonce="random").to_json()

    def command(self) -> list[str]:
        """Return the program with its arguments, as in submission.json."""
        return [self.program.target, *self.program.args]


def load(path: Path, to_run: bool = True) -> Spec:
    """Return the Spec in `path`. Raise SpecError if this version cannot use it.

    to_run: this process will run the program of the spec, so no other user may have written it. False to read a
    colleague's run.
    """
    try:
        with path.open(encoding="utf-8") as file:
            if to_run and (problem := safe_files.ownership_problem(path, os.fstat(file.fileno()), "submit again")):
                raise SpecError(problem)
            document = json.load(file)
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror}; is the run folder on a file system that this node can access?",
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
        return _value(Spec, document)  # type: ignore[no-any-return]
    except (AttributeError, KeyError, TypeError, RequestError) as error:
        raise SpecError(f"{path} does not contain a spec: {error}; submit again") from None


def ranks_per_task(folder: Path) -> int:
    """Return how many ranks each of this run's srun tasks starts, or 1 if its spec cannot be read."""
    try:
        spec = load(folder / run_folder.SPEC, to_run=False)
    except SpecError:
        return 1
    return STARTS[spec.launch.kind].ranks_per_task(spec.ranks_per_node)


def of_this_run(env: Mapping[str, str], world_size: int) -> tuple[Spec, Path] | tuple[None, None]:
    """Return the spec and folder of the run of this process, or (None, None) if the world sizes differ.

    The user's own srun inside the job, or a rank started manually, may have another world size. Then the sizes, the
    layout and the nonce of the submission do not apply to it.
    """
    folder = env.get(run_folder.ENV_FOLDER)
    if not folder:
        return None, None
    spec = load(Path(folder) / run_folder.SPEC)
    return (spec, Path(folder)) if spec.world_size == world_size else (None, None)


def _value(kind: Any, given: Any) -> Any:
    """Return `given`, plain JSON, as a value of type `kind`: a part of the Spec, or a list as a tuple."""
    if isinstance(given, list):
        return tuple(_value(next(iter(get_args(kind)), None), each) for each in given)
    if not is_dataclass(kind):
        return given
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints.get(name), value) for name, value in given.items()})  # type: ignore[operator]
