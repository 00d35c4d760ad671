"""The program of a rank with hpcinit."""

import torch
import torch.distributed as dist

import hpcinit
from benchmarks.launching import arrived

with hpcinit.session():
    dist.all_reduce(torch.ones(1))
    arrived.at(arrived.now(), dist.barrier)
