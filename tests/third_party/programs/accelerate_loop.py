"""accelerate's training loop as in its documentation: `Accelerator()`, prepare, backward."""

import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator()
    x = torch.arange(8.0).unsqueeze(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(x, 2 * x + 1), batch_size=1, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    seen: list[float] = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        seen += inputs.flatten().tolist()

    total = accelerator.reduce(torch.tensor(float(accelerator.process_index)))
    report = {
        "rank": accelerator.process_index,
        "world": accelerator.num_processes,
        "local_rank": accelerator.local_process_index,
        "sum": total.item(),
        "seen": seen,
        "gradient": [p.grad.flatten().tolist() for p in model.parameters()],
        "weights": [p.flatten().tolist() for p in model.parameters()],
    }
    print(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    main()
