"""Everything that can be known to be wrong before the queue, all of it in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from hpcinit.config import (
    chains,
    extra_options,
    launches,
    needs,
    partition,
    places,
    program,
    secret_files,
    surroundings,
    timeouts,
    training,
)
from hpcinit.config.schema import Config
from hpcinit.facts import hosts, quoting, secret_names
from hpcinit.facts.deepspeed_options import OFFLOAD, OPTIMIZERS
from hpcinit.facts.errors import RequestError
from hpcinit.facts.layout import CP_KINDS
from hpcinit.facts.spec import CHECKPOINTING, DEVICE_ID, HANG_ACTIONS, LAUNCHES, PARAM, REDUCE, SEED_BY
from hpcinit.facts.stopping import SIGNALS
from hpcinit.facts.user_paths import expanded, unknown_user
from hpcinit.facts.wrappers import WRAPPERS

T = TypeVar("T")
ranks_per_node = partition.ranks_per_node
CHOICES = {
    "cluster.engine": ("slurm", "local"),
    "cluster.gpu_flag": ("gpus-per-node", "gres", None),
    "comm.backend": ("auto", "nccl", "gloo"),
    "comm.device_id": DEVICE_ID,
    "seed_by": SEED_BY,
    "parallel.wrap": WRAPPERS.keys(),
    "parallel.cp_kind": CP_KINDS,
    "precision.param": PARAM,
    "precision.reduce": REDUCE,
    "activation_checkpointing": CHECKPOINTING,
    "deepspeed.offload_param": OFFLOAD,
    "deepspeed.offload_optimizer": OFFLOAD,
    "deepspeed.optimizer": OPTIMIZERS,
    "launch.kind": LAUNCHES,
    "cluster.container.runtime": surroundings.RUNTIMES,
    "stop.signal": SIGNALS,
    "snapshot": ("none", "git"),
    "hang.action": HANG_ACTIONS,
}
AT_LEAST_ONE = (
    *("nodes", "ranks_per_node", "cpus_per_rank", "time_min", "cluster.time_min", "cluster.cpus_per_node"),
    *("stop.every_steps", "stop.signal_before_s", "restart.without_progress"),
    *("cluster.max_array_size", "bad_nodes.limit"),
    *("sweep.at_once", "model.params", "model.layers", "model.hidden", "model.heads", "model.sequence"),
)
AT_LEAST_ZERO = (
    *("cluster.gpus_per_node", "mem_gb", "cluster.mem_gb", "cluster.mem_gb_per_rank"),
    *("launch.wait_s", "seed", "gradient_clip", "stop.margin_s", "hang.after_s", "restart.budget", "spares"),
    "launch.max_restarts",
)
MORE_THAN_ZERO = (
    *("comm.collective_timeout_s", "comm.checkpoint_timeout_s", "comm.timeout_base_s", "comm.timeout_max_s"),
    *("cluster.gpu_mem_gb", "cluster.timeout_base_s", "cluster.timeout_max_s", "bad_nodes.expiry_h"),
)
MOST_SEED = 2**63 - 1  # what torch.manual_seed takes
# Texts that become an option or a path: '' is no value for one, as null is.
NOT_EMPTY = (
    *("runs_dir", "partition", "account", "qos", "comment", "launch.cpu_bind", "launch.gpu_bind", "cluster.name"),
    *("cluster.venv", "cluster.conda", "cluster.scratch", "cluster.cache", "cluster.local_disk"),
    *("container.image", "container.python"),
)


def problems(config: Config, *, to_submit: bool = True) -> list[str]:
    """One complete message per problem; empty if the request can be rendered.

    to_submit: with what only a submission needs, such as a budget and files that are there.
    """
    values = (_choices, _finite, _numbers, _more_numbers, _names, _texts, extra_options.problems, chains.problems)
    here = (
        *(program.problems, surroundings.problems, secret_files.problems),
        *(needs.problems, places.problems),
    )
    found: list[str] = []
    for check in (*values, *(here if to_submit else ()), partition.problems, launches.problems):
        found.extend(check(config))
    if not found:  # arithmetic on numbers that are wrong by themselves only adds noise
        found.extend(_arithmetic(config))
    return found


def _get(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _choices(config: Config) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            names = ", ".join("null" if c is None else c for c in choices)
            yield f"{key} is {value!r}, expected one of: {names}"


def _finite(config: Config) -> Iterator[str]:
    for key, value in _leaves("", config, float):
        if not math.isfinite(value):
            yield f"{key} is {value}, expected a finite number"


def _numbers(config: Config) -> Iterator[str]:
    for keys, least in ((AT_LEAST_ONE, 1), (AT_LEAST_ZERO, 0)):
        for key in keys:
            value = _get(config, key)
            if isinstance(value, (int, float)) and value < least:
                yield f"{key} is {value}, expected {least} or more"


def _more_numbers(config: Config) -> Iterator[str]:
    if config.seed > MOST_SEED:
        yield f"seed is {config.seed}, expected at most {MOST_SEED} (2**63 - 1)"
    for key in MORE_THAN_ZERO:
        value = _get(config, key)
        if isinstance(value, (int, float)) and value <= 0:
            yield f"{key} is {value:g}, expected more than 0"
    for key in ("comm.timeout_per_node_s", "cluster.timeout_per_node_s"):
        value = _get(config, key)
        if isinstance(value, (int, float)) and value < 0:
            yield f"{key} is {value:g}, expected 0 or more"


def _names(config: Config) -> Iterator[str]:
    if not quoting.PLAIN_NAME.fullmatch(config.name):
        yield (
            f"name is {config.name!r}, expected letters, digits, '.', '_' and '-' only, the first a letter or a "
            "digit: it becomes the job's name and part of the run folder's"
        )
    for key in NOT_EMPTY:
        if _get(config, key) == "":
            otherwise = "a name" if key == "cluster.name" else "a folder" if key == "runs_dir" else "a value, or null"
            yield f"{key} is '', expected {otherwise}"
    for key, env in (("cluster.env", config.cluster.env), ("job.env", config.job.env)):
        for name in env:
            if not quoting.ENV_NAME.fullmatch(name):
                yield f"{key} has {name!r}, expected a name of letters, digits and '_'"


def _texts(config: Config) -> Iterator[str]:
    """Every text that reaches the script. Arguments of the program do not: they travel in spec.json."""
    for key in ("job.args", "cluster.setup"):
        for item in _get(config, key):  # type: ignore[attr-defined]
            if not isinstance(item, str):
                yield f"{key} has {item!r}, expected a list of texts; quote an item that has brackets or ': ' in it"
    for key, text in _leaves("", config, str):
        if key == "name" or key.startswith("deepspeed."):  # has its own, stricter rule; travels in spec.json only
            continue
        if key.startswith(("job.args", "job.script", "job.module", "job.command", "cluster.setup")):
            if "\0" in text:
                yield f"{key} contains a NUL character, which no program can be given"
        elif reason := quoting.unsafe(text):
            secret = secret_names.named(key.rpartition(".")[2]) and not key.startswith("secrets.")  # a path
            shown = secret_names.HIDDEN if secret else repr(text)
            yield f"{key} is {shown}: it {reason}, and it would become part of the script; remove it"
    for key, place in (("runs_dir", config.runs_dir), ("job.workdir", config.job.workdir or ".")):
        path = str(expanded(place).absolute())
        if user := unknown_user(place):
            yield f"{key} is {place!r}, and there is no user {user!r}; expected a folder, or ~/... for one in your home"
        elif not quoting.unsafe(place) and (reason := quoting.unsafe_path(path)):
            yield f"{key} means the folder {path!r}: its name {reason}, which sbatch would misread; use another folder"


def _leaves(prefix: str, value: object, kind: type[T]) -> Iterator[tuple[str, T]]:
    if isinstance(value, kind):
        yield prefix, value
    elif fields := getattr(type(value), "__dataclass_fields__", None):
        for name in fields:
            item = getattr(value, name)
            if item is not None and (isinstance(item, kind) or not isinstance(item, (str, int, float))):
                yield from _leaves(f"{prefix}.{name}" if prefix else name, item, kind)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(f"{prefix}.{name}", str(name), kind)
            yield from _leaves(f"{prefix}.{name}", item, kind)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(prefix, item, kind)


def _arithmetic(config: Config) -> Iterator[str]:
    checks: tuple[Callable[[], object], ...] = (
        lambda: hosts.rename("node", config.cluster.host_template),
        lambda: timeouts.law(config),
    )
    for check in checks:
        try:
            check()
        except RequestError as error:
            yield str(error)
    yield from training.problems(config, ranks_per_node(config))


def warnings(config: Config) -> list[str]:
    """What is not refused and is worth a look, of a config without problems."""
    return [*partition.warnings(config), *training.warnings(config, ranks_per_node(config))]
