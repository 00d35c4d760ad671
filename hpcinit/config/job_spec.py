"""Makes the Spec from a checked config. The Spec is the file from which the job reads its settings.

A config key reaches the job if the Spec, or one of its parts, has a field of the same name.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from hpcinit.base.text import expanded
from hpcinit.config import hetjob, schema
from hpcinit.config.resources import cpus_per_rank, gpus_per_node
from hpcinit.config.schema import Config
from hpcinit.deepspeed.deepspeed_keys import DeepSpeed
from hpcinit.records.components import ranks, ranks_in_a_row
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Comm, Hang, Launch, NodeCheck, Precision, Program, Samples, Spec, Training
from hpcinit.records.startup_timeout import StartupTimeout
from hpcinit.records.stop_reasons import Stopping
from hpcinit.records.wrappers import WRAPPERS
from hpcinit.world import ports

T = TypeVar("T")


def make(config: Config, workdir: str, target: str) -> Spec:
    """Return the Spec of a config that has passed its checks.

    workdir: the working folder. With a code snapshot, it differs from the config's.
    target: the program. With a code snapshot, it differs from the config's.
    """
    parts = hetjob.parts(config)
    return _copied(
        Spec,
        config,
        cluster=config.cluster.name,
        nodes=sum(part.nodes for part in parts),
        ranks_per_node=parts[0].ranks_per_node,
        components=parts if len(parts) > 1 else (),
        program=Program(program_kind(config), target, tuple(config.job.args)),
        workdir=workdir,
        nonce=secrets.token_hex(16),
        layout=full_layout(config),
        comm=_copied(
            Comm,
            config.comm,
            deepspeed=uses_deepspeed(config),
            timeout=startup_timeout(config),
            host_template=config.cluster.host_template,
        ),
        batch=samples(config),
        training=training(config),
        stop=_copied(
            Stopping,
            config.stop,
            signal=config.stop.signal or "",
            continues=config.chain > 1 or bool(config.restart.max_restarts),
        ),
        hang=_copied(Hang, config.hang),
        check_node=_copied(NodeCheck, config.check_node),
        launch=launch(config),
    )


def settings(config: Config) -> dict[str, Any]:
    """Return the values in the Spec that differ from the defaults, as in {'layout.dp': 8}.

    The job's name, its nodes and ranks, its program, and srun's options are not included.
    """
    spec = make(config, "", "")
    plain = Spec(spec.name, spec.cluster, spec.nodes, spec.ranks_per_node, spec.program, "", spec.nonce)
    launch = replace(spec.launch, kind=plain.launch.kind, max_restarts=0, preload=tuple(schema.Launch().preload))
    options = asdict(DeepSpeed()) if uses_deepspeed(config) else spec.training.deepspeed
    plain = replace(plain, components=spec.components, launch=launch, training=Training(deepspeed=options))
    default = _flat(asdict(plain))
    return {key: value for key, value in _flat(asdict(spec)).items() if default.get(key, ...) != value}


def _flat(document: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in document.items():
        flat.update(_flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value})
    return flat


def _copied(kind: type[T], keys: object, **computed: Any) -> T:
    """Return an object of type `kind`.

    keys: the object from which the new object's fields are copied.
    computed: the values of the fields that are not copied.
    """
    names = [each.name for each in fields(kind) if each.name not in computed]  # type: ignore[arg-type]
    return kind(**{name: getattr(keys, name) for name in names}, **computed)


def workdir(config: Config) -> Path:
    return expanded(config.job.workdir or ".").absolute()


def runs_dir(config: Config) -> Path:
    return expanded(config.runs_dir).absolute()


def program_kind(config: Config) -> str:
    """Return which of 'script', 'module' and 'command' the job sets."""
    return next(kind for kind in ("script", "module", "command") if getattr(config.job, kind))


def layout(config: Config) -> Layout:
    """Return the configured layout, in which one degree can be -1. Raise RequestError if a degree is impossible."""
    return _copied(Layout, config.parallel)


def full_layout(config: Config) -> Layout:
    """Return the layout of all ranks of the job, with every degree computed. Raise RequestError if there is none."""
    parts = hetjob.parts(config)
    alike = parts[0].ranks_per_node if len({part.ranks_per_node for part in parts}) == 1 else None
    return layout(config).over(ranks(parts), alike).over(ranks(parts), ranks_in_a_row(parts))


def samples(config: Config) -> Samples:
    """Return the batch sizes that the request sets."""
    return _copied(Samples, config.batch)


def training(config: Config) -> Training:
    """Return the settings that run.wrap uses. Raise SpecError for an invalid value."""
    return _copied(
        Training,
        config,
        wrap=config.parallel.wrap,
        precision=_copied(Precision, config.precision),
        deepspeed=asdict(config.deepspeed),
    )


# Modules that run.wrap, run.load and an optimizer's first step import. Otherwise, each rank would spend a second on
# them after each restart.
WARM_MODULES = ("torch._dynamo", "hpcinit.train.checkpoint")


def launch(config: Config) -> Launch:
    """Return the settings with which hpcinit starts the ranks."""
    deepspeed = ["deepspeed"] if uses_deepspeed(config) else []
    warm = WARM_MODULES if config.restart.warm and "torch" in config.launch.preload else ()
    return _copied(
        Launch,
        config.launch,
        preload=tuple(dict.fromkeys([*config.launch.preload, *deepspeed, *warm])),
        cpus=cpus_per_rank(config),
        gpu_bind=gpu_bind(config),
        warm=config.restart.warm,
        spares=warm_spares(config),
        without_progress=config.restart.without_progress if config.restart.warm else Launch.without_progress,
    )


def warm_spares(config: Config) -> int:
    """Return how many spare nodes run a fork server from the start: all if restart.warm is set, otherwise none."""
    return config.spare_nodes if config.restart.warm else 0


def gpu_bind(config: Config) -> str | None:
    """Return the value for srun's --gpu-bind, or None if the job requests no GPUs."""
    return config.launch.gpu_bind if gpus_per_node(config) and config.cluster.gpu_flag else None


def startup_timeout(config: Config) -> StartupTimeout:
    """Return the start-up timeout of the request. Raise RequestError if it is not positive."""
    return StartupTimeout(**{name: value for name, (value, _) in timeout_sources(config).items()})


def timeout_sources(config: Config) -> Mapping[str, tuple[float, str]]:
    """Return the value of each coefficient of the start-up timeout, and the config key that sets it, or 'default'.

    A value in the request replaces the cluster's.
    """
    found = {}
    for each in (one for one in fields(StartupTimeout) if one.name.endswith("_s")):  # other fields are not keys
        found[each.name] = (float(str(each.default)), "default")
        for group, keys in (("cluster", config.cluster), ("comm", config.comm)):
            value = getattr(keys, f"timeout_{each.name}")
            if value is not None:
                found[each.name] = (value, f"{group}.timeout_{each.name}")
    return found


def ports_variable(config: Config) -> Mapping[str, str]:
    """Return the environment variable that passes comm.ports to the ranks, or {} if that key is not set."""
    return {} if config.comm.ports is None else {ports.ENV_PORTS: str(config.comm.ports)}


def uses_deepspeed(config: Config) -> bool:
    """Return whether the ranks use DeepSpeed. Return False for an invalid wrapper, which the checks report."""
    wrapper = WRAPPERS.get(config.parallel.wrap)
    return config.comm.deepspeed or (wrapper is not None and wrapper.needs_deepspeed)
