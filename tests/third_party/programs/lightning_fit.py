"""Lightning's Trainer with DDP, without any code for Slurm or hpcinit."""

import json
import os

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        self.seen += x.flatten().tolist()
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    x = torch.arange(8.0).unsqueeze(1)
    model = Regression()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("DEVICES", "2")),
        num_nodes=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, 2 * x + 1), batch_size=1, shuffle=True))
    total = trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum")
    report = {
        "rank": trainer.global_rank,
        "world": trainer.world_size,
        "local_rank": trainer.local_rank,
        "sum": float(total),
        "seen": model.seen,
        "gradient": [p.grad.flatten().tolist() for p in model.parameters()],
        "weights": [p.flatten().tolist() for p in model.parameters()],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
