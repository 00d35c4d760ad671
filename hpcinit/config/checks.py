"""All checks of a config before the job is queued. They report every problem in one pass."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from hpcinit.base import quoting
from hpcinit.base.errors import RequestError
from hpcinit.base.text import expanded, unknown_user
from hpcinit.config import (
    dependency,
    environment_checks,
    hetjob,
    job_spec,
    keys,
    partition,
    program_checks,
    program_source,
    secret_files,
    slurm_options,
    training,
    unused_settings,
)
from hpcinit.config.request import Rewritten, as_text
from hpcinit.config.resources import ranks_per_node as ranks_per_node  # noqa: PLC0414 - part of this module
from hpcinit.config.schema import Config
from hpcinit.records import run_folder, secret_names
from hpcinit.records.starts import STARTS
from hpcinit.world import network, ports

T = TypeVar("T")
# Bindings that hpcinit can do itself where it starts the ranks of a node. srun's others depend on the devices' places.
CPU_BIND = r"none|mask_cpu:[0-9a-fA-Fx,]+|map_cpu:[0-9a-fA-Fx,]+|cores|threads"
GPU_BIND = r"none|single:1|per_task:\d+|map_gpu:[\d,]+"


def problems(config: Config, *, to_submit: bool = True) -> list[str]:
    """Return one complete message per problem; empty if the request can be rendered.

    to_submit: also check what only a submission needs, such as an account and existing files.
    """
    values = (_declared, _finite, _names, _texts, slurm_options.problems, _dependencies, _restarts)
    here = (
        *(program_checks.problems, program_source.problems, secret_files.problems, partition.missing_keys),
        environment_checks.problems,
    )
    found: list[str] = []
    for check in (*values, *(here if to_submit else ()), partition.problems, _launch):
        found.extend(check(config))
    found.extend(hetjob.problems(config, partition.problems))
    if not found:  # arithmetic on invalid numbers would only add noise
        found.extend(_arithmetic(config))
    return found


def _declared(config: Config) -> Iterator[str]:
    """Compare each value with the choices and bounds that the schema declares."""
    for key, item in keys.declared().items():
        value, about = keys.value(config, key), item.metadata
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if about["choices"] and value not in keys.choices(key):
            yield f"{key} is {value!r}, expected {keys.expected(key)}"
        elif about["filled"] and value == "":
            yield f"{key} is '', expected {about['filled']}"
        elif not isinstance(value, (int, float)):
            continue
        elif about["least"] is not None and value < about["least"]:
            yield f"{key} is {shown}, expected {about['least']} or more"
        elif about["above"] is not None and value <= about["above"]:
            yield f"{key} is {shown}, expected more than {about['above']}"
        elif about["most"] is not None and value > about["most"]:
            yield f"{key} is {shown}, expected at most {about['most']}"


def _finite(config: Config) -> Iterator[str]:
    for key, value in _leaves("", config, float):
        if not math.isfinite(value):
            yield f"{key} is {value}, expected a finite number"


def _names(config: Config) -> Iterator[str]:
    if not quoting.PLAIN_NAME.fullmatch(config.name):
        yield (
            f"name is {config.name!r}, expected letters, digits, '.', '_' and '-' only, starting with a letter or a "
            "digit: the names of the job and of the run folder contain it"
        )
    for key, env in (("cluster.env", config.cluster.env), ("job.env", config.job.env)):
        for name in env:
            if not quoting.ENV_NAME.fullmatch(name):
                yield f"{key} has {name!r}, expected a name of letters, digits and '_'"
            value = env[name]
            if isinstance(value, Rewritten):
                yield _rewritten(f"{key}.{name}", value)
            elif not isinstance(value, str):
                yield f"{key}.{name} is {as_text(value)}, expected text in quotes"


def _rewritten(key: str, value: Rewritten) -> str:
    """Return the message for a text that YAML has changed."""
    is_, reads = value.written or "empty", f", which YAML reads as {value}" if value.written != value else ""
    unquoted = "" if value == as_text(None) else f", or write {value}"
    return f'{value.where}: {key} is {is_}{reads}, expected text: quote it, as in "{value.written}"{unquoted}'


def _texts(config: Config) -> Iterator[str]:
    """Check every text that becomes part of the script. The program's arguments do not: they are in spec.json."""
    for key in ("job.args", "cluster.modules", "cluster.setup"):
        for at, item in enumerate(keys.value(config, key)):
            if isinstance(item, Rewritten):
                yield _rewritten(f"{key}[{at}]", item)
            elif not isinstance(item, str):
                yield f"{key} has {item!r}, expected a list of strings; quote an item that contains brackets or ': '"
    for key, text in _leaves("", config, str):
        if key == "name" or key.startswith("deepspeed."):  # a stricter check exists; only in spec.json
            continue
        if key.startswith(("job.args", "job.script", "job.module", "job.command", "cluster.setup")):
            if "\0" in text:
                yield f"{key} contains a NUL character, which cannot be passed to a program; remove it"
        elif reason := quoting.unsafe(text):
            secret = secret_names.named(key.rpartition(".")[2]) and not key.startswith("secrets.")  # a path
            shown = secret_names.HIDDEN if secret else repr(text)
            yield f"{key} is {shown}: it {reason}, which is not allowed in the script; remove it"
    for key, place in (("runs_dir", config.runs_dir), ("job.workdir", config.job.workdir or ".")):
        path = str(expanded(place).absolute())
        if user := unknown_user(place):
            yield f"{key} is {place!r}, and there is no user {user!r}; expected a folder, or ~/... for one in your home"
        elif not quoting.unsafe(place) and (reason := quoting.unsafe_path(path)):
            yield f"{key} is the folder {path!r}: its name {reason}, which sbatch would misread; use another folder"


def _dependencies(config: Config) -> Iterator[str]:
    """Check dependency and chain."""
    yield from dependency.problems(config.dependency or None)
    requested = ["dependency"] * bool(config.dependency) + ["chain"] * (config.chain > 1)
    if requested and config.cluster.engine == "local":
        verb = "is" if len(requested) == 1 else "are"
        yield (
            f"{', '.join(requested)} {verb} set, but cluster {config.cluster.name} has no queue (engine: local), so "
            "jobs start at once; run the first with wait=true, then the next, or choose a cluster with Slurm"
        )


def _restarts(config: Config) -> Iterator[str]:
    restart = config.restart
    if config.spare_nodes and config.cluster.engine == "local":
        name = config.cluster.name
        yield f"spare_nodes is {config.spare_nodes}, but all nodes of cluster {name} are this machine"
    if unknown := [reason for reason in restart.on if reason not in run_folder.REASONS]:
        yield f"restart.on has {', '.join(map(repr, unknown))}, expected some of: {', '.join(run_folder.REASONS)}"
    if restart.max_restarts is None:
        return
    for option in ("requeue", "no-requeue"):
        if option in config.cluster.sbatch:
            yield f"cluster.sbatch.{option} and restart.max_restarts={restart.max_restarts} are both set; remove one"
    if restart.max_restarts and config.cluster.engine == "local":
        yield (
            f"restart.max_restarts is {restart.max_restarts}, but cluster {config.cluster.name} has no queue "
            "(engine: local) to requeue a job; choose a cluster with Slurm"
        )
    if run_folder.TIME_LIMIT in restart.on and restart.max_restarts and config.chain > 1:
        yield (
            f"restart.on contains time_limit and chain is {config.chain}: both continue the run after a time limit; "
            "remove one"
        )


def _launch(config: Config) -> Iterator[str]:
    """Check the keys of `launch` against its kind."""
    launch = config.launch
    start = STARTS.get(launch.kind, STARTS["srun"])  # another value is reported with the choices
    for name in launch.preload:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            yield f"launch.preload has {name!r}, expected the name of a module, as in transformers or my.models"
    if launch.max_restarts > 0 and not start.restarts_ranks:
        yield (
            f"launch.max_restarts is {launch.max_restarts}, but launch.kind is {launch.kind}, expected torchrun: set "
            "launch=torchrun, or restart.max_restarts instead"
        )
    text = None if config.comm.ports is None else str(config.comm.ports)
    if text is not None and (reason := ports.problem(text)):
        yield f"comm.ports {reason}"
    elif start.restarts_ranks and text and "-" not in text:
        yield (
            f"comm.ports is {text!r}, expected a range such as 20000-20100: with launch=torchrun, the agents need "
            "ports too. Set a range, or launch=srun"
        )
    if start.task_per_rank:
        return
    for key, value, known in (("cpu_bind", launch.cpu_bind, CPU_BIND), ("gpu_bind", launch.gpu_bind, GPU_BIND)):
        if value and not re.fullmatch(rf"(?:(?:quiet|verbose|q|v),)?(?:{known})", value):
            names = ", ".join(word.partition(":")[0] for word in known.split("|"))
            yield (
                f"launch.{key} is {value!r}, expected one of: {names}, null. With launch.kind={launch.kind} hpcinit "
                "binds the ranks; for the other values of srun, set launch=srun"
            )


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
        lambda: network.rename_host("node", config.cluster.host_template),
        lambda: job_spec.startup_timeout(config),
    )
    for check in checks:
        try:
            check()
        except RequestError as error:
            yield str(error)
    for world in hetjob.worlds(config):
        yield from training.problems(world)


def warnings(config: Config) -> list[str]:
    """Return warnings about a config that has no problems."""
    return [
        *program_source.warnings(config),
        *unused_settings.warnings(config),
        *partition.warnings(config),
        *training.warnings(config),
    ]
