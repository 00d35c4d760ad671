"""Every problem of a config that can be found before the job is queued, reported in one pass."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from hpcinit.base import quoting
from hpcinit.base.errors import RequestError
from hpcinit.base.text import expanded, unknown_user
from hpcinit.config import (
    environment_checks,
    job_spec,
    keys,
    partition,
    program_checks,
    secret_files,
    slurm_options,
    training,
)
from hpcinit.config.schema import Config
from hpcinit.records import run_folder, secret_names
from hpcinit.world import hosts

T = TypeVar("T")
ranks_per_node = partition.ranks_per_node
# The binding that a node's task can do for its ranks; srun's other ways need to know where the devices are.
CPU_BIND = r"none|mask_cpu:[0-9a-fA-Fx,]+|map_cpu:[0-9a-fA-Fx,]+|cores|threads"
GPU_BIND = r"none|single:1|per_task:\d+|map_gpu:[\d,]+"


def problems(config: Config, *, to_submit: bool = True) -> list[str]:
    """One complete message per problem; empty if the request can be rendered.

    to_submit: with what only a submission needs, such as a budget and files that are there.
    """
    values = (_declared, _finite, _names, _texts, slurm_options.problems, _dependencies, _restarts)
    here = (
        *(program_checks.problems, secret_files.problems, partition.missing_keys),
        environment_checks.problems,
    )
    found: list[str] = []
    for check in (*values, *(here if to_submit else ()), partition.problems, _launch):
        found.extend(check(config))
    if not found:  # arithmetic on numbers that are wrong by themselves only adds noise
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
            f"name is {config.name!r}, expected letters, digits, '.', '_' and '-' only, the first a letter or a "
            "digit: it becomes the job's name and part of the run folder's"
        )
    for key, env in (("cluster.env", config.cluster.env), ("job.env", config.job.env)):
        for name in env:
            if not quoting.ENV_NAME.fullmatch(name):
                yield f"{key} has {name!r}, expected a name of letters, digits and '_'"


def _texts(config: Config) -> Iterator[str]:
    """Every text that reaches the script. Arguments of the program do not: they travel in spec.json."""
    for key in ("job.args", "cluster.setup"):
        for item in keys.value(config, key):
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


def jobs_named(value: object) -> list[str]:
    """Return the jobs and runs that `after` or `after_ok` names: one, or a list."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [str(item) for item in items]


def _dependencies(config: Config) -> Iterator[str]:
    """Check what a job waits for, and how many jobs a run is: after, after_ok, singleton and chain."""
    for key in ("after", "after_ok"):
        yield from _names_jobs(key, getattr(config, key))
    asked = [key for key in ("after", "after_ok", "singleton") if getattr(config, key)]
    asked += ["chain"] * (config.chain > 1)
    if asked and config.cluster.engine == "local":
        verb = "is" if len(asked) == 1 else "are"
        yield (
            f"{', '.join(asked)} {verb} given, but cluster {config.cluster.name} has no queue (engine: local): a job "
            "starts at once; run the first with wait=true, then the next, or choose a cluster with Slurm"
        )


def _restarts(config: Config) -> Iterator[str]:
    asked = config.restart
    if config.spare_nodes and config.cluster.engine == "local":
        name = config.cluster.name
        yield f"spare_nodes is {config.spare_nodes}, but the nodes of cluster {name} are all this machine"
    if unknown := [word for word in asked.on if word not in run_folder.REASONS]:
        yield f"restart.on has {', '.join(map(repr, unknown))}, expected some of: {', '.join(run_folder.REASONS)}"
    if asked.max_restarts is None:
        return
    for option in ("requeue", "no-requeue"):
        if option in config.cluster.sbatch:
            yield f"cluster.sbatch.{option} and restart.max_restarts={asked.max_restarts}: give one of them"
    if asked.max_restarts and config.cluster.engine == "local":
        yield (
            f"restart.max_restarts is {asked.max_restarts}, but cluster {config.cluster.name} has no queue "
            "(engine: local) that could take a job back; choose a cluster with Slurm"
        )
    if run_folder.TIME_LIMIT in asked.on and asked.max_restarts and config.chain > 1:
        yield f"restart.on has time_limit, and so has chain={config.chain}, whose next job goes on: give one of them"


def _names_jobs(key: str, value: object) -> Iterator[str]:
    if isinstance(value, (dict, bool)):
        yield f"{key} is {value!r}, expected a job id or a run, or a list of them, as in {key}=[4242,train-0001]"
        return
    for word in jobs_named(value):
        if not word.strip() or word == "None":
            yield f"{key} names {word!r}, expected a job id or a run: its folder, or the folder's name"


def _launch(config: Config) -> Iterator[str]:
    """Check the keys of `launch` against its kind."""
    launch = config.launch
    for name in launch.preload:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            yield f"launch.preload has {name!r}, expected the name of a module, as in transformers or my.models"
    if launch.max_restarts > 0 and launch.kind != "torchrun":
        yield (
            f"launch.max_restarts is {launch.max_restarts}, but launch.kind is {launch.kind}: launch=torchrun, or "
            "restart.max_restarts"
        )
    if launch.kind == "srun":
        return
    for key, value, known in (("cpu_bind", launch.cpu_bind, CPU_BIND), ("gpu_bind", launch.gpu_bind, GPU_BIND)):
        if value and not re.fullmatch(rf"(?:(?:quiet|verbose|q|v),)?(?:{known})", value):
            names = ", ".join(word.partition(":")[0] for word in known.split("|"))
            yield (
                f"launch.{key} is {value!r}, but launch.kind is {launch.kind}, whose ranks are bound without Slurm, "
                f"expected one of: {names}, null; or launch=srun"
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
        lambda: hosts.rename("node", config.cluster.host_template),
        lambda: job_spec.startup_timeout(config),
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
