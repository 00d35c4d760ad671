"""A training run of two ranks that saves every fifth step. Kill a rank: kill -9 PID, with a PID that it prints."""

import os
import time

import hpcinit
import torch

STEPS = int(os.environ.get("STEPS", "120"))

with hpcinit.session() as run:
    wrapped = run.wrap(torch.nn.Linear(8, 1), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4))
    loaded = run.load(wrapped, "checkpoints")
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    print(f"start {start}: rank {run.rank} is process {os.getpid()}", flush=True)
    for step in range(loaded.step if loaded else 0, STEPS):
        loss = wrapped(torch.randn(4, 8)).square().mean()
        wrapped.backward(loss)
        wrapped.step()
        run.progress(step + 1, STEPS, loss=loss.item())
        print(f"step {step + 1}", flush=True)
        if (step + 1) % 5 == 0:
            run.save(wrapped, "checkpoints", step + 1, keep=2)
        time.sleep(0.5)  # so that you have a minute to kill a rank
