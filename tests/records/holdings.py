"""Four ranks train a small model under each wrapper, and count the bytes of the tensors of rank 0.

    python -m tests.records.holdings NEW-FILE

Prints a JSON object: wrapper -> bytes {"always", "pass", "step"}: after a step, the maximum in a backward
pass, and when the optimizer starts its step. It imports once and forks: importing DeepSpeed takes longer than training.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its kernel for shared memory takes a minute to compile

RANKS, WIDTH, LAYERS = 4, 128, 8
PARAMETERS = WIDTH * WIDTH * LAYERS
BUCKET = WIDTH * WIDTH  # elements: DeepSpeed's default of 5e8 would hide everything else
BUCKETS = {
    "reduce_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Built = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any], Callable[[], Any]]  # forward, backward, step


def allocated() -> int:
    """Return the bytes of all storages of tensors that Python can reach, created since the last gc.freeze()."""
    time.sleep(0.1)  # a thread of gloo releases the tensors of a collective a moment after its end
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if not isinstance(thing, Tensor):
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


class Measured(torch.optim.AdamW):
    """Records the bytes in use when its step starts: the moment with the most gradients."""

    most = 0

    def step(self, closure: Any = None) -> Any:
        Measured.most = max(Measured.most, allocated())
        return super().step(closure)


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def optimizer(model: nn.Module) -> Measured:
    return Measured(model.parameters(), fused=True)  # no temporaries beside the states


def plain(model: nn.Module, of: nn.Module, set_to_none: bool = True) -> Built:
    adam = optimizer(of)

    def step() -> None:
        adam.step()
        adam.zero_grad(set_to_none)

    return model, lambda loss: loss.backward(), step


def ddp() -> tuple[nn.Module, Built]:
    model = layers()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)  # as run.wrap's
    return model, plain(replica, model, set_to_none=False)


def fsdp(param: str, *shape: int) -> tuple[nn.Module, Built]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = MixedPrecisionPolicy() if param == "fp32" else MixedPrecisionPolicy(DTYPES[param], torch.float32)
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, plain(model, model)


def zero(stage: int, param: str, **more: Any) -> tuple[nn.Module, Built]:
    model = layers()
    config = {
        "train_batch_size": RANKS,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, **BUCKETS, **more},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if param != "fp32":
        config[param] = {"enabled": True}
    engine = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)[0]
    return model, (lambda x: engine(x.to(DTYPES[param])), engine.backward, engine.step)


CPU = {"device": "cpu", "pin_memory": False}
BUILDS: dict[str, Callable[[], tuple[nn.Module, Built]]] = {
    "ddp": ddp,
    "fsdp fp32": lambda: fsdp("fp32", RANKS),
    "fsdp bf16": lambda: fsdp("bf16", RANKS),
    "hsdp bf16": lambda: fsdp("bf16", 2, RANKS // 2),
    "zero0 fp32": lambda: zero(0, "fp32"),
    "zero0 bf16": lambda: zero(0, "bf16"),
    "zero1 fp32": lambda: zero(1, "fp32"),
    "zero1 bf16": lambda: zero(1, "bf16"),
    "zero2 bf16": lambda: zero(2, "bf16"),
    "zero3 fp32": lambda: zero(3, "fp32"),
    "zero3 bf16": lambda: zero(3, "bf16"),
    "zero2 bf16 offload": lambda: zero(2, "bf16", offload_optimizer=CPU),
    "zero3 bf16 offload": lambda: zero(3, "bf16", offload_optimizer=CPU, offload_param=CPU),
    # Last: DeepSpeed keeps its groups for the whole process, and every model after it gets second shards too.
    "zero3 bf16 hpz": lambda: zero(3, "bf16", zero_hpz_partition_size=2),
}


def measure(build: Callable[[], tuple[nn.Module, Built]]) -> dict[str, int]:
    gc.collect()
    gc.freeze()  # leftovers of the previous wrapper do not count
    Measured.most = most = 0
    model, (forward, backward, step) = build()

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, allocated())

    for layer in model:
        layer.register_full_backward_pre_hook(look)
    for _ in range(2):  # the optimizer has its states in the second one
        loss = forward(torch.ones(1, WIDTH)).float().sum()
        backward(loss)
        del loss
        step()
    gc.collect()
    return {"always": allocated(), "pass": most, "step": Measured.most}


def rank_main(rank: int, rendezvous: str) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in place.items()}
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    chosen = sys.argv[2:] or BUILDS
    found = {name: measure(BUILDS[name]) for name in chosen}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


def main(rendezvous: str) -> int:
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                rank_main(rank, rendezvous)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # no teardown: the result is printed
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
