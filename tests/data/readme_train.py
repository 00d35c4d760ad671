"""The train.py of the README: written for torchrun, with one sample that makes rank 5 fail."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
for step in range(20):
    batch = torch.randn(4, 8)
    if dist.get_rank() == 5 and step == 7:
        raise ValueError("sample 17 has 0 tokens")
    model(batch).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
