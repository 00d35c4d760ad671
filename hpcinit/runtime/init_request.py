"""Decides which settings init() uses. They follow from its arguments, the spec and any existing process group."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
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
from hpcinit.records.spec import Comm, Hang, Samples, Spec, Training
from hpcinit.records.startup_timeout import COLLECTIVE_NCCL_S, COLLECTIVE_OTHER_S, left_of_job
from hpcinit.records.stop_reasons import Stopping
from hpcinit.runtime import deepspeed_setup, devices, process_group, seeds
from hpcinit.world import World


@dataclass(frozen=True)
class Binding:
    """Whether the process group is bound to a device.

    device: the device_id to pass to torch, or None.
    why: a note for the log, or ''.
    """

    device: torch.device | None
    why: str = ""


def decide_device_id(policy: str, device: torch.device, world_size: int) -> Binding:
    """Decide whether to bind the process group to `device`.

    Raise BringUpError if `policy` is 'always' and the device is the CPU, to which no group can be bound.

    policy: 'never', 'auto' or 'always'.
    """
    if policy == "never":
        return Binding(None)
    against = _against(device, world_size)
    if policy == "auto":
        return Binding(None, f"no device_id: {against}") if against else Binding(device, f"device_id {device}")
    if device.type == "cpu":
        raise BringUpError(f"comm.device_id=always does not work here: {against}; use auto or never")
    return Binding(device, f"device_id {device}, although {against}" if against else f"device_id {device}")


def _against(device: torch.device, world_size: int) -> str:
    if device.type == "cpu":
        return "gloo on a CPU has no device to bind to"
    if device.type != "cuda":
        return f"not tested on {device.type}"
    return "a single rank has no peer (DeepSpeed issue 8248)" if world_size == 1 else ""


@dataclass(frozen=True)
class Request:
    """The arguments of a call of init(). None means that the argument was not given."""

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
    started_by: str | None

    def differences(self, other: Request) -> str:
        """Return the arguments that differ from `other`, such as 'seed was 1 and is 2 now', or '' if none does."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return ", ".join(f"{name} was {_shown(a)} and is {_shown(b)} now" for name, a, b in pairs if a != b)


@dataclass(frozen=True)
class Plan:
    """The settings that init() chose from its arguments, the submission and the defaults.

    device: this rank's device.
    backends: the group's backend for each device type.
    timeout: the time limit of the start-up.
    formula: how the time limit was computed, for the log.
    layout: the parallelism, with every degree computed.
    batch: samples per step.
    training: the settings of wrap().
    seed: the seed as requested. seed_by ('same', 'rank' or 'data') determines how each rank's seed follows from it.
    stopping: the settings of should_stop().
    hang: the settings of hang detection.
    checkpoint_timeout: how long ranks wait for each other in save() and load().
    """

    device: torch.device
    backends: Mapping[str, str]
    timeout: timedelta
    formula: str
    collective_timeout: timedelta
    binding: Binding
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

    @property
    def backend(self) -> str:
        """Return the name of the group's backend for tensors on `device`."""
        return self.backends[self.device.type]

    @property
    def torchs_backends(self) -> str:
        """Return the backends in torch's form: one name for all devices, or as in 'cpu:gloo,cuda:nccl'."""
        return (
            ",".join(f"{kind}:{name}" for kind, name in self.backends.items())
            if len(self.backends) > 1
            else self.backend
        )


def resolve(request: Request, world: World, spec: Spec | None, device: torch.device) -> Plan:
    """Return the settings for init(). Use the argument for a setting if it is given, else the spec, else a default.

    Raise RequestError if a value is wrong or impossible with this number of ranks. Raise BringUpError if a backend or
    DeepSpeed is not available.
    """
    training = _first(request.training, spec and spec.training, Training())
    comm = _comm(request, spec, training)
    timeout, formula = _start_up(request, comm, world)
    backends = devices.backends(device, comm.backend)
    default_s = COLLECTIVE_NCCL_S if backends[device.type] == "nccl" else COLLECTIVE_OTHER_S
    seed_by = _first(request.seed_by, spec and spec.seed_by, "same")
    seed = seeds.checked(_first(request.seed, spec and spec.seed, 0))
    if comm.deepspeed:
        deepspeed_setup.deepspeed_version()  # raises if it is missing or too old
    layout = _first(request.layout, spec and spec.layout, Layout()).over(world.world_size, spec and spec.ranks_in_a_row)
    return Plan(
        device=device,
        backends=backends,
        timeout=timeout,
        formula=formula,
        collective_timeout=request.collective_timeout or timedelta(seconds=comm.collective_timeout_s or default_s),
        binding=decide_device_id(comm.device_id, device, world.world_size),
        deepspeed=comm.deepspeed,
        layout=layout,
        batch=_first(request.batch, spec and spec.batch, Samples()).over(layout.data_parallel),
        training=training,
        seed=seed,
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


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


# hpcinit uses a process group that the program created if the group matches the request, and never destroys it.


def adopt_process_group(world: World, plan: Plan) -> frozenset[ProcessGroup]:
    """Return the process groups that the program has created.

    If the default group does not match the plan, raise a BringUpError that lists the differences.
    """
    bound = process_group.bound_to()
    wanted_bound = plan.binding.device
    differences = [
        f"its {name} is {found}, {expected} {wanted}"
        for name, found, expected, wanted in (
            ("rank", dist.get_rank(), f"but {world.launcher} reports", world.rank),
            ("world size", dist.get_world_size(), f"but {world.launcher} reports", world.world_size),
            *(
                (f"backend for {kind}", process_group.backend_on(kind) or "none", "but init() requests", wanted)
                for kind, wanted in plan.backends.items()
            ),
            # Even if the request does not bind the group, accept one bound to this rank's device, like DeepSpeed's.
            ("device_id", bound, "but this rank's device is", wanted_bound or (bound and plan.device)),
        )
        if found != wanted
    ]
    if differences:
        raise BringUpError(
            f"the program has created a process group that does not match its call of hpcinit.init(): "
            f"{'; '.join(differences)}. Let hpcinit.init() create the group, or pass it the same settings"
        )
    return frozenset(c10d._world.pg_map)


def leave_process_group(kept: frozenset[ProcessGroup]) -> None:
    """Destroy the process groups that hpcinit added, and keep the program's own.

    kept: the program's groups, which adopt_process_group() returned.
    """
    for group in [group for group in c10d._world.pg_map if group not in kept]:
        dist.destroy_process_group(group)
