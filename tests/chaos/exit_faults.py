"""`python exit_faults.py FAULT [KIND]`: a loop of collectives in which rank 3 does something wrong at step 3.

KIND: `plain` uses torch alone, `megatron` also prints its steps as Megatron-LM does, `lightning` uses Lightning's
Trainer. Without KIND the program uses hpcinit.init().
"""

import ctypes
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

CULPRIT, AT_STEP, STEPS = 3, 3, 6
TIMEOUT_S = 15.0  # of collectives


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Samples of which one kills the worker that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


def kill(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def failing_thread() -> None:
    """Wait for the result of a thread that has raised, as a program does whose prefetching thread died."""
    ready = threading.Event()

    def read() -> None:
        raise ValueError("bad shard 17")

    threading.Thread(target=read, name="reader").start()
    ready.wait()


def endless() -> None:
    while True:
        time.sleep(0.01)


def full_disk() -> None:
    with Path("/dev/full").open("w") as file:  # the kernel answers each write with ENOSPC
        file.write("x" * 100_000)


def exhaust_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
    bytearray(1 << 37)


def raise_error() -> None:
    raise ValueError("bad sample 17")


FAULTS: dict[str, Callable[[], object]] = {
    "exception": raise_error,
    "thread": failing_thread,
    "sigkill": lambda: kill(signal.SIGKILL),
    "sigterm": lambda: kill(signal.SIGTERM),
    "sigint": lambda: kill(signal.SIGINT),
    "sigsegv": lambda: kill(signal.SIGSEGV),
    "abort": os.abort,
    "os-exit": lambda: os._exit(0),
    "sys-exit": lambda: sys.exit(0),
    "return": lambda: None,
    "loop": endless,
    "held-gil": lambda: ctypes.PyDLL(None).sleep(600),
    "sigstop": lambda: kill(signal.SIGSTOP),
    "memory": exhaust_memory,
    "broadcast": lambda: dist.broadcast(torch.ones(4), 0),
    "size": lambda: dist.all_reduce(torch.ones(8)),
    "skip": lambda: None,
    "loader": lambda: list(torch.utils.data.DataLoader(Samples(), num_workers=1)),
    "disk": full_disk,
}
INSTEAD = {"broadcast", "size", "skip"}  # instead of a collective


def note_time() -> None:
    """Write when the fault happens, for the test."""
    if folder := os.environ.get("HPCINIT_RUN"):
        Path(folder, "fault_time").write_text(str(time.time()))


def train(fault: str, rank: int, report: Callable[[int, int], object]) -> None:
    for step in range(1, STEPS + 1):
        at_fault = rank == CULPRIT and step == AT_STEP
        if at_fault:
            note_time()
            FAULTS[fault]()
            if fault == "return":
                return
        if not (at_fault and fault in INSTEAD):
            dist.all_reduce(torch.ones(4))
        report(step, STEPS)
        time.sleep(0.05)


def as_megatron(step: int, total: int) -> None:
    """Print a step as Megatron-LM's last rank does."""
    if dist.get_rank() == dist.get_world_size() - 1:
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        print(
            f" [{now}] iteration {step:8}/{total:8} | consumed samples: {step * 64:12} | lm loss: 1.0E+01 |", flush=True
        )


def fit(fault: str) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if self.global_rank == CULPRIT and number == AT_STEP:
                FAULTS[fault]()
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    ddp = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo", timeout=timeout)
    shape = {"accelerator": "cpu", "devices": 4 // nodes, "num_nodes": nodes, "max_epochs": 1}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    samples = torch.utils.data.DataLoader(torch.ones(4 * STEPS, 1))
    lightning.Trainer(strategy=ddp, **shape, **quiet).fit(Model(), samples)


def join() -> None:
    """Wait for the start of all ranks, which may take longer than TIMEOUT_S on a busy machine, and form the group."""
    store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(minutes=5)))
    store.set(f"started/{rank}", "")
    store.wait([f"started/{each}" for each in range(size)])
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def main() -> None:
    fault, *kind = (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank="))  # DeepSpeed's
    if kind == ["lightning"]:
        fit(fault)
    elif kind:
        join()
        if kind == ["megatron"] and dist.get_rank() == 0:
            print(f"using world size: {dist.get_world_size()}, data-parallel size: {dist.get_world_size()}", flush=True)
        plain = as_megatron if kind == ["megatron"] else lambda step, total: print("step", step, flush=True)
        train(fault, dist.get_rank(), plain)
    else:
        import hpcinit

        run = hpcinit.init()
        train(fault, run.rank, run.progress)


if __name__ == "__main__":
    main()
