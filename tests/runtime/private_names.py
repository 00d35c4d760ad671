"""The private names of torch and DeepSpeed that hpcinit uses.

A private name can disappear in any release. test_private_names.py finds every use in hpcinit, and checks that each name
exists in the installed version; make test, make test-torch and make test-deepspeed-0.18 run it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcinit.base import versions


@dataclass(frozen=True)
class PrivateName:
    """`name` in `owner`, a module or 'module:Class' of `package`.

    since: the first version that has it, '' for all tested ones. on_instances: only an instance has it, not its class.
    """

    package: str
    owner: str
    name: str
    since: str = ""
    on_instances: bool = False

    def expected(self, version: str) -> bool:
        """Return whether `version` of the package should have the name."""
        return not self.since or versions.key(version) >= versions.key(self.since)


def _torch() -> Iterator[PrivateName]:
    for owner, names in (
        ("torch._C._distributed_c10d", "HashStore PrefixStore Store TCPStore _dump_fr_trace_json"),
        ("torch._C._distributed_c10d:Backend.Options", "_timeout"),
        ("torch._C._distributed_c10d:ProcessGroup", "_device_types _get_backend _get_sequence_number_for_group"),
        ("torch._C._distributed_c10d:ProcessGroupGloo", "_set_default_timeout"),
        ("torch.cuda", "_is_in_bad_fork"),
        ("torch.distributed._functional_collectives", "all_to_all_single_autograd"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "checkpoint_wrapper"),
        ("torch.distributed.device_mesh:DeviceMesh", "_concatenate _flatten"),
        (
            "torch.distributed.distributed_c10d",
            "_get_default_group _get_default_store _new_process_group_helper "
            "_world.pg_group_ranks _world.pg_map _world.pg_names",
        ),
        (
            "torch.distributed.elastic.agent.server.api:SimpleElasticAgent",
            "_exit_barrier _monitor_workers _shutdown _start_workers _stop_workers",
        ),
        ("torch.utils", "_device"),
        ("torch.utils._pytree", "tree_map_only"),
        ("torch.utils.data._utils.signal_handling", "_error_if_any_worker_fails _set_worker_signal_handlers"),
        ("torch.utils.data._utils.worker", "_worker_loop"),
    ):
        for name in names.split():
            yield PrivateName("torch", owner, name)
    for name in ("_mesh_dim_names", "_root_mesh"):
        yield PrivateName("torch", "torch.distributed.device_mesh:DeviceMesh", name, on_instances=True)
    loader = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
    for name in ("_workers", "_task_info", "_rcvd_idx"):
        yield PrivateName("torch", loader, name, on_instances=True)
    agent = "torch.distributed.elastic.agent.server.api:SimpleElasticAgent"
    yield PrivateName("torch", agent, "_remaining_restarts", on_instances=True)


# deepspeed.utils.groups keeps process groups in these.
GROUPS = (
    "_ALL_TO_ALL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_MODEL_PARALLEL_GROUP",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
)


def _deepspeed() -> Iterator[PrivateName]:
    for name in GROUPS:
        yield PrivateName("deepspeed", "deepspeed.utils.groups", name)
    groups, engine = "deepspeed.utils.groups", "deepspeed.runtime.engine:DeepSpeedEngine"
    yield PrivateName("deepspeed", groups, "_release_process_group_references", since="0.19.8")
    yield PrivateName("deepspeed", engine, "_config", on_instances=True)
    yield PrivateName("deepspeed", engine, "_copy_recovery_script")
    yield PrivateName("deepspeed", engine, "_has_autoep_layers", since="0.19.8")
    yield PrivateName("deepspeed", "deepspeed.ops", "__compatible_ops__")


NAMES = (*_torch(), *_deepspeed())
