"""Hugging Face's Trainer on a tiny model made from its config: no weights and no data are downloaded."""

import json
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.seen.append(index)
        ids = (torch.arange(6) + index) % 16
        return {"input_ids": ids, "labels": ids}


class Gradients(TrainerCallback):
    """Keep the gradients, which the Trainer clears after each step."""

    def on_pre_optimizer_step(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        self.last = [p.grad.double().sum().item() for p in model.parameters() if p.grad is not None]


def main() -> None:
    args = TrainingArguments(
        output_dir="out",
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        max_steps=2,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    data = Sentences()
    gradients = Gradients()
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[gradients])
    last = get_last_checkpoint("out") if Path("out").is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    state = PartialState()
    total = reduce(torch.tensor(float(args.process_index)), reduction="sum")
    report = {
        "rank": args.process_index,
        "world": args.world_size,
        "local_rank": state.local_process_index,
        "sum": total.item(),
        "seen": data.seen,
        "gradient": gradients.last,
        "weights": [p.double().sum().item() for p in model.parameters()],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
