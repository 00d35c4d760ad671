"""A program that resumes exactly: weights, optimizer, scheduler, data order, random state. The tests plant bugs in it."""

import random
import signal
import sys
import tempfile  # noqa: F401 - for a planted bug
import time
from pathlib import Path

import torch

STEPS, EVERY, FOLDER = 24, 6, "checkpoints"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
stop: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))


def save(step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    state |= {"step": step, "random": torch.get_rng_state()}
    torch.save(state, f"{FOLDER}/saving")
    time.sleep(0.05)
    Path(f"{FOLDER}/saving").replace(f"{FOLDER}/step-{step:03}.pt")


Path(FOLDER).mkdir(exist_ok=True)
step = 0
if found := sorted(str(path) for path in Path(FOLDER).glob("*.pt")):
    state = torch.load(found[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"])
    step = state["step"]
while step < STEPS:
    epoch, batch = divmod(step, 8)
    order = list(range(256))
    random.Random(epoch).shuffle(order)
    inputs = data[order[batch * 32 : batch * 32 + 32]]
    loss = (model(inputs) - inputs.pow(2).sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    time.sleep(0.03)
    print(f"step {step} loss {loss.item():.6f}", flush=True)
    if step % EVERY == 0 or stop:
        save(step)
    if stop:
        sys.exit(143)
