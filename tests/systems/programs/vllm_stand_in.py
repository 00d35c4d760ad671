"""A stand-in for vLLM's functions that join a process group, because vLLM cannot be installed beside this torch.

It makes the same calls of torch, in the same order and with the same arguments, as vLLM's `vllm/distributed/utils.py`,
and is written for these tests: `stateless_init_torch_distributed_process_group` with gloo, and the part of
`StatelessProcessGroup` that exchanges objects before NCCL is started.
"""

from __future__ import annotations

import pickle
import socket
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroup, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo, _get_default_timeout
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


class Stateless:
    """Do what `StatelessProcessGroup.create` and `broadcast_obj` do: rank 0 listens, and objects are keys of its store."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self.rank, self.sent = rank, 0
        descriptor = None
        if rank == 0:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen()
            descriptor = listener.detach()  # the store closes it, as in vLLM's create_tcp_store
        self.store = TCPStore(
            host_name=host,
            port=port,
            world_size=world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=300),
            use_libuv=False,
            master_listen_fd=descriptor,
        )

    def broadcast_obj(self, obj: object, src: int) -> object:
        key = f"broadcast_from/{src}/{self.sent}"
        self.sent += 1
        if self.rank == src:
            self.store.set(key, pickle.dumps(obj))
            return obj
        return pickle.loads(self.store.get(key))
