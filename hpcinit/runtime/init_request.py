"""From init's arguments, the submission's spec and a group that may exist, to the Plan of what init will do."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hpcinit.base.errors import BringUpError
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import SEED_BY, Comm, Hang, Samples, Spec, Training, one_of
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.records.stop_reasons import Stopping
from hpcinit.runtime import deepspeed_setup, device_id, devices, process_group
from hpcinit.world import World


@dataclass(frozen=True)
class Request:
    """The arguments of init; None is what the caller left open."""

    backend: str | None
    timeout: timedelta | None
    collective_timeout: timedelta | None
    device_id: str | None
    deepspeed: bool | None
    layout: Layout | None
    batch: Samples | None
    training: Training | None
    seed: int | None
    seed_by: str | None
    deterministic: bool | None
    launcher: str | None

    def differences(self, other: Request) -> str:
        """'seed was 1 and is 2 now', for the fields that differ only; '' for the same request."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return ", ".join(f"{name} was {_shown(a)} and is {_shown(b)} now" for name, a, b in pairs if a != b)


@dataclass(frozen=True)
class Plan:
    """What init decided, from its arguments, the submission and the defaults.

    backend: of the group on `device`. timeout: of the start-up; formula: the same with its terms, for the log line.
    layout: every degree known. batch: samples of a step. training: what wrap() goes by. seed: as asked, before seed_by
    ('same', 'rank' or 'data') makes it this rank's. stopping: what should_stop() goes by. hang: how long without a step
    is one. checkpoint_timeout: how long ranks wait for each other in save() and load()."""

    device: torch.device
    backend: str
    timeout: timedelta
    formula: str
    collective_timeout: timedelta
    binding: device_id.Binding
    deepspeed: bool
    layout: Layout
    batch: Batch
    training: Training
    seed: int
    seed_by: str
    deterministic: bool
    stopping: Stopping
    hang: Hang
    checkpoint_timeout: timedelta


def resolve(request: Request, world: World, spec: Spec | None, device: torch.device) -> Plan:
    """The request first, then the submission, then the defaults. Raises RequestError or BringUpError."""
    training = _first(request.training, spec and spec.training, Training())
    comm = _comm(request, spec, training)
    timeout, formula = _start_up(request, comm, world)
    later = request.collective_timeout or _seconds(comm.collective_timeout_s) or comm.timeout.start_up(world.nodes)
    seed_by = _first(request.seed_by, spec and spec.seed_by, "same")
    one_of("seed_by", seed_by, SEED_BY)
    above = deepspeed_setup.deepspeed_version() if comm.deepspeed else None
    layout = _first(request.layout, spec and spec.layout, Layout()).over(world.world_size, spec and spec.ranks_per_node)
    return Plan(
        device=device,
        backend=devices.backend(device, comm.backend),
        timeout=timeout,
        formula=formula,
        collective_timeout=later,
        binding=device_id.decide(comm.device_id, device, world.world_size, torch.__version__, above),
        deepspeed=comm.deepspeed,
        layout=layout,
        batch=_first(request.batch, spec and spec.batch, Samples()).over(layout.data_parallel),
        training=training,
        seed=_first(request.seed, spec and spec.seed, 0),
        seed_by=seed_by,
        deterministic=_first(request.deterministic, spec and spec.deterministic, False),
        stopping=spec.stop if spec else Stopping(),
        hang=spec.hang if spec else Hang(),
        checkpoint_timeout=timedelta(seconds=comm.checkpoint_timeout_s),
    )


def _comm(request: Request, spec: Spec | None, training: Training) -> Comm:
    given = {name: getattr(request, name) for name in ("backend", "deepspeed", "device_id")}
    comm = replace(spec.comm if spec else Comm(), **{k: v for k, v in given.items() if v is not None})
    return comm if request.deepspeed is not None else replace(comm, deepspeed=_needs_deepspeed(comm, training))


def _needs_deepspeed(comm: Comm, training: Training) -> bool:
    return comm.deepspeed or training.wrapper.needs_deepspeed


def _start_up(request: Request, comm: Comm, world: World) -> tuple[timedelta, str]:
    if request.timeout is not None:
        return request.timeout, f"{request.timeout.total_seconds():g} s"
    left = left_of_job(os.environ, time.time())
    return comm.timeout.start_up(world.nodes, left), comm.timeout.text(world.nodes, left)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _seconds(number: float | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


# A process group that somebody else made: taken as it is if it is the one asked for, and never destroyed from here.


def adopt_process_group(world: World, plan: Plan) -> frozenset[ProcessGroup]:
    """The groups that are there and must stay. Raises BringUpError that names each difference from what is asked."""
    bound = process_group.bound_to()
    wanted_bound = plan.binding.device
    differences = [
        f"its {name} is {found}, and {said} {asked}"
        for name, found, said, asked in (
            ("rank", dist.get_rank(), f"{world.launcher} says", world.rank),
            ("world size", dist.get_world_size(), f"{world.launcher} says", world.world_size),
            ("backend", process_group.backend_on(plan.device) or "none", f"on {plan.device} asked is", plan.backend),
            # A group that is bound to this rank's device, as DeepSpeed's own are, is no worse for not being asked for.
            ("device_id", bound, "this rank's device is", wanted_bound or (bound and plan.device)),
        )
        if found != asked
    ]
    if differences:
        raise BringUpError(
            f"a process group is up that hpcinit did not make, and it is another than init is asked for: "
            f"{'; '.join(differences)}. Call hpcinit.init() in the place of what made it, or ask for what it is"
        )
    return frozenset(c10d._world.pg_map)


def leave_process_group(kept: frozenset[ProcessGroup]) -> None:
    """Destroy what was made on top of it (a mesh's groups), and nothing else."""
    for group in [group for group in c10d._world.pg_map if group not in kept]:
        dist.destroy_process_group(group)
