"""Lists the private names of torch and DeepSpeed that hpcinit uses, and which feature needs each of them.

A new release of torch or DeepSpeed can remove a private name. If the installed version is newer than all tested ones,
init() prints the features that no longer work. tests/runtime/test_private_names.py finds every use of a private name in
hpcinit, and checks that the tested versions have it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcinit.base import versions
from hpcinit.base.console import say


@dataclass(frozen=True)
class PrivateName:
    """A private name of another package that hpcinit uses.

    owner: the module or the class ('module:Class') that contains the name.
    lost: the feature that does not work without the name.
    since: the first version that has the name, or '' if all tested versions have it.
    on_instances: whether only instances have the name, not their class.
    is_module: whether the name is a module in the package `owner`.
    """

    package: str
    owner: str
    name: str
    lost: str
    since: str = ""
    on_instances: bool = False
    is_module: bool = False

    def expected(self, version: str) -> bool:
        """Return whether this version of the package should have the name."""
        return not self.since or versions.key(version) >= versions.key(self.since)

    def is_missing(self) -> bool:
        """Return whether the name is missing from the package. If its module is not imported yet, return False."""
        module, _, path = self.owner.partition(":")
        found: Any = sys.modules.get(module)
        if found is None or self.on_instances:
            return False
        if self.is_module:
            return importlib.util.find_spec(f"{module}.{self.name}") is None
        for part in (*filter(None, path.split(".")), *self.name.split(".")):
            if not hasattr(found, part):
                return True
            found = getattr(found, part)
        return False


def _torch() -> Iterator[PrivateName]:
    timeouts = "comm.collective_timeout_s for process groups"
    records = "flight-recorder dumps of ranks that use gloo"
    dimensions = "meshes of several dimensions, such as run.mesh['dp', 'sp'] or HSDP"
    workers = "data loader workers that survive SIGTERM"
    agent = "launch=torchrun"
    for owner, names, lost in (
        ("torch._C._distributed_c10d", "_dump_fr_trace_json", records),
        ("torch._C._distributed_c10d:Backend.Options", "_timeout", timeouts),
        ("torch._C._distributed_c10d:ProcessGroup", "_device_types _get_backend", timeouts),
        ("torch._C._distributed_c10d:ProcessGroup", "_get_sequence_number_for_group", "collectives in hang reports"),
        ("torch._C._distributed_c10d:ProcessGroupGloo", "_set_default_timeout", timeouts),
        ("torch.cuda", "_is_in_bad_fork", "the check that imports before the fork (launch=fork) do not use CUDA"),
        ("torch.distributed._functional_collectives", "all_to_all_single_autograd", "Ulysses"),
        (
            "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
            "checkpoint_wrapper",
            "parallel.activation_checkpointing",
        ),
        ("torch.distributed.device_mesh:DeviceMesh", "_concatenate _flatten", dimensions),
        ("torch.distributed.distributed_c10d", "_get_default_store", "hpcinit doctor on nodes"),
        ("torch.distributed.distributed_c10d", "_new_process_group_helper", "hpcinit.side_group()"),
        ("torch.distributed.distributed_c10d", "_world.pg_group_ranks", f"{records}, and hpcinit.side_group()"),
        (
            "torch.distributed.distributed_c10d",
            "_world.pg_map",
            "process groups that the program created, and checkpoints",
        ),
        ("torch.distributed.distributed_c10d", "_world.pg_names", f"{timeouts}, and hpcinit.side_group()"),
        (
            "torch.distributed.elastic.agent.server.api:SimpleElasticAgent",
            "_exit_barrier _monitor_workers _shutdown _start_workers _stop_workers",
            agent,
        ),
        ("torch.utils._pytree", "tree_map_only", "run.wrap()"),
        (
            "torch.utils.data._utils.signal_handling",
            "_error_if_any_worker_fails _set_worker_signal_handlers",
            workers,
        ),
        ("torch.utils.data._utils.worker", "_worker_loop", workers),
    ):
        for name in names.split():
            yield PrivateName("torch", owner, name, lost)
    yield PrivateName("torch", "torch.utils", "_device", "imports before the fork (launch=fork)", is_module=True)
    for name in ("_mesh_dim_names", "_root_mesh"):
        yield PrivateName("torch", "torch.distributed.device_mesh:DeviceMesh", name, dimensions, on_instances=True)
    loader = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
    for name in ("_workers", "_task_info", "_rcvd_idx"):
        yield PrivateName("torch", loader, name, "the DataLoader worker in hang reports", on_instances=True)
    server = "torch.distributed.elastic.agent.server.api:SimpleElasticAgent"
    yield PrivateName("torch", server, "_remaining_restarts", agent, on_instances=True)


def _deepspeed() -> Iterator[PrivateName]:
    groups, engine = "deepspeed.utils.groups", "deepspeed.runtime.engine:DeepSpeedEngine"
    again, reshaped = (
        "a second DeepSpeed start in one process",
        "loading DeepSpeed's checkpoints with a different number of ranks",
    )
    yield PrivateName("deepspeed", groups, "_release_process_group_references", again, since="0.19.8")
    yield PrivateName("deepspeed", engine, "_config", reshaped, on_instances=True)
    yield PrivateName("deepspeed", engine, "_copy_recovery_script", "run.save() with DeepSpeed")
    yield PrivateName("deepspeed", engine, "_has_autoep_layers", "run.export() with DeepSpeed", since="0.19.8")
    yield PrivateName(
        "deepspeed", "deepspeed.ops", "__compatible_ops__", "starting DeepSpeed on CPUs without compiling an op"
    )
    builder = "deepspeed.ops.op_builder.builder:OpBuilder"
    yield PrivateName("deepspeed", builder, "_loaded_ops", "ops that hpcinit build-ops has compiled")


NAMES = (*_torch(), *_deepspeed())


def report_lost(package: str, names: tuple[PrivateName, ...] = NAMES) -> None:
    """Print the features that do not work with the installed version of `package`. The package must be imported."""
    version = versions.installed(package)
    if not version or not versions.newer_than_tested(package, version):
        return
    for name in names:
        if name.package == package and name.expected(version) and name.is_missing():
            say(
                f"warning: {package} {version} has no {name.owner.replace(':', '.')}.{name.name}, so this feature does "
                f"not work: {name.lost}. If you need it: pip install '{package}<={versions.TESTED[package].newest}'"
            )
