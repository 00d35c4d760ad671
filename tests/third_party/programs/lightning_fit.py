"""Lightning's Trainer with DDP, without any code for Slurm or hpcinit."""

import json
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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
        accelerator="auto",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        logger=False,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(x, 2 * x + 1), batch_size=1, shuffle=True), ckpt_path="last")
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
