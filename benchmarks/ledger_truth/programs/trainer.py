"""A tiny run of the real transformers.Trainer or lightning.Trainer without hpcinit; a callback records the truth."""
# ruff: noqa: E402, PLC0415 - the first line is the start of the program, and imports are measured
# mypy: disable-error-code="import-not-found, no-any-return, var-annotated, arg-type"

import time

FIRST = time.time()

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import foreign
import record


def huggingface(plan: dict[str, Any]) -> None:
    import torch
    import transformers

    rank = foreign.number("RANK")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            time.sleep(plan["step_s"] if self.training else 0.1)
            out = self.layer(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    class Truth(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.mark("wrap")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            record.mark("step", step=state.global_step)
            record.fail(plan["faults"], state.global_step + 1, rank)

    class Trainer(transformers.Trainer):
        def _save_checkpoint(self, *args: Any, **named: Any) -> Any:
            record.mark("save+")
            time.sleep(plan["save_s"])
            result = super()._save_checkpoint(*args, **named)
            record.mark("save-")
            return result

        def evaluate(self, *args: Any, **named: Any) -> Any:
            record.mark("phase+")
            result = super().evaluate(*args, **named)
            record.mark("phase-")
            return result

    data = [{"x": torch.randn(8), "labels": torch.zeros(1)} for _ in range(64)]
    record.mark("init_call")
    arguments = transformers.TrainingArguments(
        "out", max_steps=plan["total"], per_device_train_batch_size=2, logging_steps=plan["log_every"],
        save_steps=plan["save_every"], eval_strategy="steps" if plan["phase_every"] else "no",
        eval_steps=plan["phase_every"] or None, per_device_eval_batch_size=8, use_cpu=True, report_to="none",
    )  # fmt: skip
    record.mark("init")
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Truth()])
    trainer.train(resume_from_checkpoint=bool(list(Path("out").glob("checkpoint-*"))))
    record.mark("done")


def lightning(plan: dict[str, Any]) -> None:
    import lightning as pl
    import torch

    rank = foreign.number("RANK", "SLURM_PROCID")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            time.sleep(plan["step_s"])
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> None:
            time.sleep(0.1)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Truth(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            record.mark("wrap")

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            record.mark("step", step=trainer.global_step)
            record.fail(plan["faults"], trainer.global_step + 1, rank)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            record.mark("phase+")

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            record.mark("phase-")

    class Checkpoint(pl.pytorch.callbacks.ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, path: str) -> None:
            record.mark("save+")
            time.sleep(plan["save_s"])
            super()._save_checkpoint(trainer, path)
            record.mark("save-")

    loader = torch.utils.data.DataLoader(torch.randn(256, 8), batch_size=2)
    record.mark("init_call")
    record.mark("init")
    ranks = foreign.number("WORLD_SIZE", "SLURM_NTASKS")
    trainer = pl.Trainer(
        max_steps=plan["total"], devices=plan["ranks_per_node"], num_nodes=plan["nodes"], accelerator="cpu",
        strategy="ddp" if ranks > 1 else "auto", log_every_n_steps=plan["log_every"], logger=False,
        callbacks=[Truth(), Checkpoint("checkpoints", every_n_train_steps=plan["save_every"], save_last=False,
                                       save_top_k=-1)],
        val_check_interval=plan["phase_every"] or None, limit_val_batches=8 if plan["phase_every"] else 0,
        num_sanity_val_steps=0, check_val_every_n_epoch=None if plan["phase_every"] else 1,
    )  # fmt: skip
    newest = max(Path("checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    trainer.fit(Model(), loader, loader if plan["phase_every"] else None, ckpt_path=str(newest) if newest else None)
    record.mark("done")


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    record.begin(FIRST, foreign.number("RANK", "SLURM_PROCID"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        {"huggingface": huggingface, "lightning": lightning}[plan["trainer"]](plan)
    except BaseException:
        record.mark("raised")
        raise
    time.sleep(plan["tail_s"])


if __name__ == "__main__":
    main()
