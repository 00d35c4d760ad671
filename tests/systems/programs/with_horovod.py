"""Horovod itself and hpcinit in one process, each with its own group. `with_horovod.py FOLDER [another | only-hpcinit]`.

another: the variables name another rank after Horovod has started. only-hpcinit: the program does not call hvd.init().
"""

from __future__ import annotations

import os
import sys

import horovod.torch as hvd
import torch
import torch.distributed as dist
from saying import refusal, say

import hpcinit


def main() -> None:
    folder, *options = sys.argv[1:]
    told = {name: text for name, text in os.environ.items() if name.startswith("HOROVOD_")}
    if options != ["only-hpcinit"]:
        hvd.init()
    if options == ["another"]:
        for name in {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"} & os.environ.keys():
            os.environ[name] = str(1 - hvd.rank())
        print(refusal(hpcinit.init), flush=True)
        hvd.shutdown()
        return
    with hpcinit.session(seed=3) as run:
        ours = torch.tensor(1.0 + run.rank)
        dist.all_reduce(ours)
        theirs = hvd.allreduce(torch.tensor(1.0 + run.rank), op=hvd.Sum)
        over = {"gloo": hvd.gloo_enabled(), "mpi": hvd.mpi_enabled()}
        say(
            folder,
            run,
            over=over,
            theirs=[hvd.rank(), hvd.size(), hvd.local_rank(), float(theirs)],
            ours=float(ours),
            told=told,
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
