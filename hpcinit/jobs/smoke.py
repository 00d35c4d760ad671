"""The default job: every rank connects, runs one all-reduce and prints a line.

If this works, training code will start too.
"""

from __future__ import annotations

import faulthandler
import socket

import torch
import torch.distributed as dist

import hpcinit

LIMIT_S = 50.0  # after all ranks have joined, so that a faulty link does not keep the nodes until the time limit


def main() -> None:
    with hpcinit.session() as run:
        # This is a C thread. It prints the stacks and ends the rank even if NCCL waits and blocks Python's lock.
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        total = torch.tensor([float(run.rank)], device=run.device)
        dist.all_reduce(total)
        expected = run.world_size * (run.world_size - 1) / 2
        host = run.world.host or socket.gethostname()
        print(
            f"rank {run.rank} of {run.world_size}: host {host}, node {run.node_rank}, local rank {run.local_rank} of "
            f"{run.local_world_size}, {run.backend} on {run.device}, all-reduce {total.item():g}",
            flush=True,
        )
        if total.item() != expected:
            raise SystemExit(
                f"all_reduce gave {total.item():g}, expected {expected:g}, the sum of all ranks: check the nodes with "
                "hpcinit doctor nodes=N"
            )
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
