"""Lists the private names of torch and DeepSpeed that hpcinit uses.

Any release of torch or DeepSpeed can remove a private name. test_private_names.py finds every use in hpcinit, and checks
that the installed versions have each name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcinit.base import versions


@dataclass(frozen=True)
class PrivateName:
    """A private name of another package that hpcinit uses.

    package, owner: where the name is: a module of the package, or a class in the form 'module:Class'.
    since: the first version that has the name, or '' if all tested versions have it.
    on_instances: whether only instances have the name, not their class.
    is_module: whether the name is a module in the package `owner`.
    """

    package: str
    owner: str
    name: str
    since: str = ""
    on_instances: bool = False
    is_module: bool = False

    def expected(self, version: str) -> bool:
        """Return whether this version of the package should have the name."""
        return not self.since or versions.key(version) >= versions.key(self.since)


TORCH = {
    "torch._C._distributed_c10d": "_dump_fr_trace_json",
    "torch._C._distributed_c10d:Backend.Options": "_timeout",
    "torch._C._distributed_c10d:ProcessGroup": "_device_types _get_backend _get_sequence_number_for_group",
    "torch._C._distributed_c10d:ProcessGroupGloo": "_set_default_timeout",
    "torch.cuda": "_is_in_bad_fork",
    "torch.distributed._functional_collectives": "all_to_all_single_autograd",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "checkpoint_wrapper",
    "torch.distributed.device_mesh:DeviceMesh": "_concatenate _flatten",
    "torch.distributed.distributed_c10d": "_get_default_store _new_process_group_helper _world.pg_group_ranks "
    "_world.pg_map _world.pg_names",
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent": "_exit_barrier _monitor_workers _shutdown "
    "_start_workers _stop_workers",
    "torch.utils._pytree": "tree_map_only",
    "torch.utils.data._utils.signal_handling": "_error_if_any_worker_fails _set_worker_signal_handlers",
    "torch.utils.data._utils.worker": "_worker_loop",
}
ON_INSTANCES = {
    "torch.distributed.device_mesh:DeviceMesh": "_mesh_dim_names _root_mesh",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_workers _task_info _rcvd_idx",
    "torch.distributed.elastic.agent.server.api:SimpleElasticAgent": "_remaining_restarts",
}


def _all() -> Iterator[PrivateName]:
    for owner, names in TORCH.items():
        for name in names.split():
            yield PrivateName("torch", owner, name)
    for owner, names in ON_INSTANCES.items():
        for name in names.split():
            yield PrivateName("torch", owner, name, on_instances=True)
    yield PrivateName("torch", "torch.utils", "_device", is_module=True)
    engine = "deepspeed.runtime.engine:DeepSpeedEngine"
    yield PrivateName("deepspeed", "deepspeed.utils.groups", "_release_process_group_references", since="0.19.8")
    yield PrivateName("deepspeed", engine, "_config", on_instances=True)
    yield PrivateName("deepspeed", engine, "_copy_recovery_script")
    yield PrivateName("deepspeed", engine, "_has_autoep_layers", since="0.19.8")
    yield PrivateName("deepspeed", "deepspeed.ops", "__compatible_ops__")
    yield PrivateName("deepspeed", "deepspeed.ops.op_builder.builder:OpBuilder", "_loaded_ops")


NAMES = tuple(_all())
