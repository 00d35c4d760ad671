"""A typical training script for torchrun: DDP, a DistributedSampler, a snapshot after each epoch.

torchrun --nproc-per-node=2 before.py --epochs 8
"""

import argparse
from pathlib import Path

import hpcinit
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--snapshot", type=Path, default=Path("snapshot.pt"))
    return parser.parse_args()


def samples() -> TensorDataset:
    """Return a noisy linear function, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 4, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(256, 1, generator=generator))


def main() -> None:
    options = arguments()
    run = hpcinit.init()
    device = run.device
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    data = samples()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))

    first = 0
    if options.snapshot.exists():
        snapshot = torch.load(options.snapshot, map_location=device)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first = snapshot["epoch"] + 1
    for epoch in range(first, options.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss of rank 0: {loss.item():.6f}", flush=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, options.snapshot)
        run.progress(epoch + 1, options.epochs, loss=loss.item())
        if run.should_stop():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
