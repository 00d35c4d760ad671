"""The program of a rank without hpcinit: env:// and one all-reduce."""

import os

if "RANK" not in os.environ:  # bare srun
    os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
                   "LOCAL_RANK": os.environ["SLURM_LOCALID"], "MASTER_ADDR": os.environ["BENCH_ADDR"],
                   "MASTER_PORT": os.environ["BENCH_PORT"]}  # fmt: skip

import torch
import torch.distributed as dist

from benchmarks.launching import arrived

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
arrived.at(arrived.now(), dist.barrier)
dist.destroy_process_group()
