"""A stand-in for vLLM's functions that join a process group, because vLLM cannot be installed beside this torch.

It makes the same calls of torch, in the same order and with the same arguments, as vLLM's `vllm/distributed/utils.py`,
and is written for these tests: `stateless_init_torch_distributed_process_group` with gloo.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_timeout, _new_process_group_helper
from torch.distributed.rendezvous import rendezvous


def join(host: str, port: int, rank: int, world_size: int) -> ProcessGroup:
    """Do what `stateless_init_torch_distributed_process_group(host, port, rank, world_size, "gloo")` does."""
    address = f"tcp://{host}:{port}"
    timeout = _get_default_timeout("gloo")
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    prefixed = PrefixStore(address, store)
    group = ProcessGroup(prefixed, rank, world_size)
    gloo = ProcessGroupGloo(prefixed, rank, world_size, timeout=timeout)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def join_by_torch(host: str, port: int, rank: int, world_size: int) -> ProcessGroup:
    """Join by torch's own functions, as OpenRLHF's and TRL's copies of init_process_group do."""
    timeout = timedelta(minutes=5)
    store, rank, world_size = next(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore("weights", store)
    return _new_process_group_helper(world_size, rank, [], "gloo", store, group_name="weights", timeout=timeout)[0]
