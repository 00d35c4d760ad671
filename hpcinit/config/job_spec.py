"""From a checked config to what the job needs: `facts.spec.Spec` and its parts.

A key reaches the job if a part of the Spec has a field of the same name.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from hpcinit.config.partition import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Comm, Hang, Launch, Precision, Program, Samples, Spec, Training
from hpcinit.records.startup_timeout import StartupTimeout
from hpcinit.records.stop_reasons import Stopping
from hpcinit.records.wrappers import WRAPPERS

T = TypeVar("T")


def make(config: Config, workdir: str, target: str) -> Spec:
    """Return the Spec of a config that has passed its checks.

    workdir, target: where the program runs and what it is, which differ from the config's in a snapshot.
    """
    per_node = ranks_per_node(config)
    return _copied(
        Spec,
        config,
        cluster=config.cluster.name,
        ranks_per_node=per_node,
        program=Program(program_kind(config), target, tuple(config.job.args)),
        workdir=workdir,
        nonce=secrets.token_hex(16),
        layout=layout(config).over(config.nodes * per_node, per_node),
        comm=_copied(
            Comm,
            config.comm,
            deepspeed=uses_deepspeed(config),
            timeout=startup_timeout(config),
            host_template=config.cluster.host_template,
        ),
        batch=samples(config),
        training=training(config),
        stop=_copied(Stopping, config.stop, signal=config.stop.signal or ""),
        hang=_copied(Hang, config.hang),
        launch=launch(config),
    )


def _copied(kind: type[T], keys: object, **computed: Any) -> T:
    """Return a `kind` whose fields are `computed`, or else the keys of the same name."""
    names = [each.name for each in fields(kind) if each.name not in computed]  # type: ignore[arg-type]
    return kind(**{name: getattr(keys, name) for name in names}, **computed)


def program_kind(config: Config) -> str:
    """Return which of script, module and command the job has."""
    return next(kind for kind in ("script", "module", "command") if getattr(config.job, kind))


def layout(config: Config) -> Layout:
    """Return the layout as it was written: a degree may be -1. Raises RequestError."""
    return _copied(Layout, config.parallel)


def samples(config: Config) -> Samples:
    """Return what was requested of the batch."""
    return _copied(Samples, config.batch)


def training(config: Config) -> Training:
    """Return what run.wrap needs. Raises SpecError for a value that is none of the choices."""
    return _copied(
        Training,
        config,
        wrap=config.parallel.wrap,
        precision=_copied(Precision, config.precision),
        deepspeed=asdict(config.deepspeed),
    )


def launch(config: Config) -> Launch:
    """Return how the ranks are started."""
    deepspeed = ["deepspeed"] if uses_deepspeed(config) else []
    return _copied(
        Launch,
        config.launch,
        preload=tuple(dict.fromkeys([*config.launch.preload, *deepspeed])),
        cpus=cpus_per_rank(config),
        gpu_bind=gpu_bind(config),
    )


def cpus_per_rank(config: Config) -> int | None:
    """Return the cores of one rank: as requested, or its share of the node's; None where the cluster gives none."""
    if config.cpus_per_rank is not None or config.cluster.cpus_per_node is None:
        return config.cpus_per_rank
    return max(1, config.cluster.cpus_per_node // ranks_per_node(config))


def gpu_bind(config: Config) -> str | None:
    """Return srun's --gpu-bind; None where the job requests no GPUs."""
    return config.launch.gpu_bind if config.cluster.gpus_per_node and config.cluster.gpu_flag else None


def startup_timeout(config: Config) -> StartupTimeout:
    """Return the start-up timeout of a request. Raises RequestError for one that gives no positive time."""
    return StartupTimeout(**{name: value for name, (value, _) in timeout_sources(config).items()})


def timeout_sources(config: Config) -> Mapping[str, tuple[float, str]]:
    """Return each coefficient's value and the key that gives it: the request's, else its cluster's, else 'default'."""
    found = {}
    for each in fields(StartupTimeout):
        found[each.name] = (float(str(each.default)), "default")
        for group, keys in (("cluster", config.cluster), ("comm", config.comm)):
            value = getattr(keys, f"timeout_{each.name}")
            if value is not None:
                found[each.name] = (value, f"{group}.timeout_{each.name}")
    return found


def uses_deepspeed(config: Config) -> bool:
    """Return whether the ranks start DeepSpeed. A wrapper that does not exist, which the checks refuse, needs none."""
    wrapper = WRAPPERS.get(config.parallel.wrap)
    return config.comm.deepspeed or (wrapper is not None and wrapper.needs_deepspeed)
