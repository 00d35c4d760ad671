"""Logs and checkpoint files as common trainers write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

Line = tuple[float, str]  # when it is written, and its text without the line end


UP = "\x1b[A"  # tqdm moves up again after a bar below another one
CLEARED = "\r" + " " * 80 + "\r"  # what tqdm.write prints before a line, to remove the bar


def is_bar(text: str) -> bool:
    """Return whether the text is a progress bar, which ends no line."""
    return text.startswith(("\r", "\n\r")) and not text.startswith(CLEARED)


def loss_at(step: int) -> float:
    return 2.0 + 8.0 / math.sqrt(step + 10) + 0.05 * math.sin(step * 12.9898)


def clock(at: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    return datetime.fromtimestamp(at).strftime(form)


def with_ms(at: float) -> str:
    return clock(at) + f",{int(at % 1 * 1000):03}"


def minutes(seconds: float) -> str:
    """Return the time as tqdm writes it."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60:02}:{rest % 60:02}"


def bar(done: int, total: int, elapsed: float, label: str = "", rate: float | None = None, tail: str = "") -> str:
    """Return a progress bar of tqdm."""
    share = done / total
    drawn = ("█" * int(10 * share)).ljust(10)
    per = rate if rate is not None else elapsed / done if done else 0.0
    speed = f"{per:.2f}s/it" if per > 1 else f"{1 / per:.2f}it/s" if per else "?it/s"
    left = minutes(per * (total - done)) if per else "?"
    return f"{label}{100 * share:3.0f}%|{drawn}| {done}/{total} [{minutes(elapsed)}<{left}, {speed}{tail}]"


@dataclass
class Shape:
    """What the formats need to know about the run."""

    total: int
    ranks: int
    log_every: int
    per_epoch: int
    step_s: float
    name: str = "out"


class Format:
    """A trainer's log: what it prints at each moment. The default prints nothing."""

    name: ClassVar[str]
    keeps_one = False  # whether each checkpoint overwrites the last one

    def __init__(self, shape: Shape) -> None:
        self.shape, self.loop_began, self.loop_from = shape, 0.0, 0
        self.epochs: dict[int, float] = {}  # when each epoch started, in this attempt
        self.unprinted: list[float] = []  # durations of the steps since the last line

    def imported(self, at: float) -> list[Line]:
        return []

    def built(self, at: float) -> list[Line]:
        return []

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        return []

    def loop(self, at: float, step: int) -> list[Line]:
        self.loop_began, self.loop_from, self.epochs, self.unprinted = at, step, {}, []
        return []

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        raise NotImplementedError

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        return []

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        return []

    def finished(self, at: float) -> list[Line]:
        return []

    def files(self, step: int) -> list[str]:
        """Return the checkpoint's files, in the order in which they are written."""
        raise NotImplementedError


class HuggingFace(Format):
    """transformers.Trainer: losses without a step, and a progress bar on stderr in the same file."""

    name = "huggingface"

    def imported(self, at: float) -> list[Line]:
        return [(at, "Loading checkpoint shards: 100%|██████████| 3/3 [00:04<00:00,  1.51s/it]")]

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        shape = self.shape
        lines = [(at, "\r" + bar(step, shape.total, at - self.loop_began, rate=seconds))]
        if step % shape.log_every == 0:
            values = {
                "loss": round(loss_at(step), 4), "grad_norm": round(1 + 0.1 * math.cos(step), 4),
                "learning_rate": 5e-05 * (1 - step / (shape.total + 1)), "epoch": round(step / shape.per_epoch, 2),
            }  # fmt: skip
            lines.append((at, CLEARED + str(values)))
        return lines

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        return [(began, f"Saving model checkpoint to {self.shape.name}/checkpoint-{step}")]

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        took, count = ended - began, 64
        lines = [
            (began + took * part / 4, "\n\r" + bar(count * part // 4, count, took * part / 4) + UP)
            for part in range(1, 5)
        ]
        values = {
            "eval_loss": round(loss_at(step), 4), "eval_runtime": round(took, 4),
            "eval_samples_per_second": round(512 / took, 3), "eval_steps_per_second": round(count / took, 3),
            "epoch": round(step / self.shape.per_epoch, 2),
        }  # fmt: skip
        return [*lines, (ended, CLEARED + str(values))]

    def finished(self, at: float) -> list[Line]:
        took = at - self.loop_began
        values = {
            "train_runtime": round(took, 4), "train_samples_per_second": round(self.shape.total * 8 / took, 3),
            "train_steps_per_second": round(self.shape.total / took, 3), "train_loss": 2.2, "epoch": 3.0,
        }  # fmt: skip
        return [(at, CLEARED + str(values))]

    def files(self, step: int) -> list[str]:
        folder = f"{self.shape.name}/checkpoint-{step}"
        names = ["config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"]
        return [f"{folder}/{name}" for name in [*names, "trainer_state.json", "training_args.bin"]]


class Lightning(Format):
    """lightning.Trainer: a progress bar per epoch, checkpoints with epoch and step in the name."""

    name = "lightning"

    def imported(self, at: float) -> list[Line]:
        return [(at, "GPU available: True (cuda), used: True"), (at, "TPU available: False, using: 0 TPU cores")]

    def built(self, at: float) -> list[Line]:
        ranks = self.shape.ranks
        lines = [(at, f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/{ranks}") for rank in
                 range(ranks)]  # fmt: skip
        text = f"All distributed processes registered. Starting with {ranks} processes"
        return [*lines, (at, "-" * 100), (at, "distributed_backend=nccl"), (at, text), (at, "-" * 100)]

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        path = self.files(step)[0]
        return [
            (began, f"Restoring states from the checkpoint path at {path}"),
            (ended, f"Restored all states from the checkpoint at {path}"),
        ]

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        per = self.shape.per_epoch
        epoch, batch = (step - 1) // per, (step - 1) % per + 1
        began = self.epochs.setdefault(epoch, at - seconds)
        if step % self.shape.log_every:
            return []
        tail = f", v_num=0, train_loss={loss_at(step):.3f}"
        return [(at, "\r" + bar(batch, per, at - began, f"Epoch {epoch}: ", seconds, tail))]

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        took = ended - began
        return [
            (began + took * part / 3, "\n\r" + bar(8 * part, 24, took * part / 3, "Validation DataLoader 0: ") + UP)
            for part in (1, 2, 3)
        ]

    def finished(self, at: float) -> list[Line]:
        return [(at, f"`Trainer.fit` stopped: `max_steps={self.shape.total}` reached.")]

    def files(self, step: int) -> list[str]:
        epoch = (step - 1) // self.shape.per_epoch
        return [f"lightning_logs/version_0/checkpoints/epoch={epoch}-step={step}.ckpt"]


class NanoGPT(Format):
    """nanoGPT: steps with their duration, without a clock; one checkpoint that is overwritten."""

    name, keeps_one = "nanogpt", True

    def imported(self, at: float) -> list[Line]:
        return [(at, f"tokens per iteration will be: {self.shape.ranks * 61440:,}")]

    def built(self, at: float) -> list[Line]:
        return [(at, "number of parameters: 123.59M"), (at, "compiling the model... (takes a ~minute)")]

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        return [(began, f"Resuming training from {self.shape.name}")]

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        if step % self.shape.log_every:
            return []
        return [(at, f"iter {step}: loss {loss_at(step):.4f}, time {1000 * seconds:.2f}ms, mfu 31.42%")]

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        return [(began, f"saving checkpoint to {self.shape.name}")]

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        return [(ended, f"step {step}: train loss {loss_at(step):.4f}, val loss {loss_at(step) + 0.1:.4f}")]

    def files(self, step: int) -> list[str]:
        return [f"{self.shape.name}/ckpt.pt"]


class Megatron(Format):
    """Megatron-LM: a clock in each line of steps, and how long a save took."""

    name = "megatron"

    def imported(self, at: float) -> list[Line]:
        return [(at, f"using world size: {self.shape.ranks}, data-parallel size: {self.shape.ranks}"),
                (at, "> initializing torch distributed ...")]  # fmt: skip

    def built(self, at: float) -> list[Line]:
        return [(at, f"[after model, optimizer, and learning rate scheduler are built] datetime: {clock(at)} ")]

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        where = f"from {self.shape.name}"
        return [(began, f" loading checkpoint {where} at iteration {step}"),
                (ended, f"  successfully loaded checkpoint {where} [ t 1/1, p 1/1 ] at iteration {step}")]  # fmt: skip

    def loop(self, at: float, step: int) -> list[Line]:
        super().loop(at, step)
        return [(at, "done with setup ..."), (at, "training ..."),
                (at, f"[before the start of training step] datetime: {clock(at)} ")]  # fmt: skip

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        self.unprinted.append(seconds)
        if step % self.shape.log_every:
            return []
        total, seconds = self.shape.total, sum(self.unprinted) / len(self.unprinted)
        self.unprinted.clear()
        return [(at, f" [{clock(at)}] iteration {step:8}/{total:8} | consumed samples: {step * 256:12} | "
                     f"elapsed time per iteration (ms): {1000 * seconds:.1f} | learning rate: 1.500000E-04 | "
                     f"global batch size:   256 | lm loss: {loss_at(step):.6E} | loss scale: 1.0 | grad norm: 1.021 | "
                     "number of skipped iterations:   0 | number of nan iterations:   0 |")]  # fmt: skip

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        took = 1000 * (ended - began)
        return [
            (began, f"saving checkpoint at iteration {step:7} to {self.shape.name} in torch_dist format"),
            (ended, f"  successfully saved checkpoint from iteration {step:7} to {self.shape.name} [ t 1/1, p 1/1 ]"),
            (ended, "(min, max) time across ranks (ms):"),
            (ended, f"    save-checkpoint ................................: ({took - 3:.2f}, {took:.2f})"),
        ]

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        text = f" validation loss at iteration {step} | lm loss value: {loss_at(step):.6E} | lm loss PPL: 1.2E+01 | "
        return [(ended, "-" * len(text)), (ended, text), (ended, "-" * len(text))]

    def finished(self, at: float) -> list[Line]:
        return [(at, f"[after training is done] datetime: {clock(at)} ")]

    def files(self, step: int) -> list[str]:
        folder = f"{self.shape.name}/iter_{step:07}"
        return [*(f"{folder}/__{rank}_0.distcp" for rank in range(self.shape.ranks)), f"{folder}/common.pt",
                f"{folder}/metadata.json"]  # fmt: skip


class DeepSpeed(Format):
    """DeepSpeed's engine: a clock in each line, and lines around each file that it saves."""

    name = "deepspeed"

    def _line(self, at: float, where: str, text: str) -> Line:
        return at, f"[{with_ms(at)}] [INFO] [{where}] {text}"

    def imported(self, at: float) -> list[Line]:
        return [self._line(at, "comm.py:637:init_distributed", "cdb=None"),
                self._line(at, "comm.py:668:init_distributed", "Initializing TorchBackend in DeepSpeed with backend "
                           "nccl")]  # fmt: skip

    def built(self, at: float) -> list[Line]:
        return [self._line(at, "logging.py:96:log_dist", "[Rank 0] DeepSpeed Final Optimizer = adamw")]

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        path = self.files(step)[0]
        where = "torch_checkpoint_engine.py:27:load"
        return [self._line(began, where, f"[Torch] Loading checkpoint from {path}..."),
                self._line(ended, where, f"[Torch] Loaded checkpoint from {path}.")]  # fmt: skip

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        if step % self.shape.log_every:
            return []
        text = f"[Rank 0] step={step}, skipped=0, lr=[0.0001], mom=[(0.9, 0.95)]"
        speed = (f"[Rank 0] time (ms) | fwd_microstep: {300 * seconds:.2f} | bwd_microstep: {600 * seconds:.2f} | "
                 f"step_microstep: {100 * seconds:.2f}")  # fmt: skip
        return [self._line(at, "logging.py:96:log_dist", text), self._line(at, "logging.py:96:log_dist", speed)]

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        path, where = self.files(step)[0], "torch_checkpoint_engine.py"
        return [
            self._line(began, "logging.py:96:log_dist", f"[Rank 0] [Torch] Checkpoint global_step{step} is about to be "
                       "saved!"),
            self._line(began, f"{where}:21:save", f"[Torch] Saving {path}..."),
            self._line(ended, f"{where}:23:save", f"[Torch] Saved {path}."),
            self._line(ended, f"{where}:33:commit", f"[Torch] Checkpoint global_step{step} is ready now!"),
        ]  # fmt: skip

    def files(self, step: int) -> list[str]:
        folder = f"{self.shape.name}/global_step{step}"
        shards = [f"{folder}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(self.shape.ranks)]
        return [f"{folder}/mp_rank_00_model_states.pt", *shards, f"{self.shape.name}/latest"]


class TorchTitan(Format):
    """torchtitan: Python's logging with a clock, and how long a save took."""

    name = "torchtitan"

    def _line(self, at: float, text: str) -> Line:
        return at, f"[rank0]:[titan] {with_ms(at)} - root - INFO - {text}"

    def imported(self, at: float) -> list[Line]:
        return [self._line(at, "Starting job: Llama 3 8B training")]

    def built(self, at: float) -> list[Line]:
        return [self._line(at, "Applied FSDP to the model")]

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        return [self._line(began, f"Loading the checkpoint from {self.shape.name}/checkpoint/step-{step}."),
                self._line(ended, f"Finished loading the checkpoint in {ended - began:.2f} seconds.")]  # fmt: skip

    def loop(self, at: float, step: int) -> list[Line]:
        super().loop(at, step)
        return [self._line(at, f"Training starts at step {step + 1}.")]

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        if step % self.shape.log_every:
            return []
        return [self._line(at, f"step: {step:2}  loss: {loss_at(step):7.4f}  grad_norm:  1.0210  memory: 47.92GiB"
                               f"(60.52%)  tps: {int(8192 / seconds):,}  tflops: 320.11  mfu: 32.37%")]  # fmt: skip

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        return [self._line(began, "Saving the checkpoint (or staging if async is enabled)."),
                self._line(ended, f"Finished saving the checkpoint in {ended - began:.2f} seconds.")]  # fmt: skip

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        return [self._line(ended, f"validate step: {step:2}  loss: {loss_at(step):7.4f}  memory: 47.92GiB(60.52%)")]

    def finished(self, at: float) -> list[Line]:
        return [self._line(at, "Training completed")]

    def files(self, step: int) -> list[str]:
        folder = f"{self.shape.name}/checkpoint/step-{step}"
        return [*(f"{folder}/__{rank}_0.distcp" for rank in range(self.shape.ranks)), f"{folder}/.metadata"]


class Plain(Format):
    """A program's own lines, with a clock or without."""

    name = "plain"
    clocked = True

    def _line(self, at: float, text: str) -> Line:
        return at, f"{with_ms(at)} INFO train: {text}" if self.clocked else text

    def imported(self, at: float) -> list[Line]:
        return [self._line(at, f"world size {self.shape.ranks}")]

    def built(self, at: float) -> list[Line]:
        return [self._line(at, "model has 1.3B parameters")]

    def loading(self, began: float, ended: float, step: int) -> list[Line]:
        return [self._line(ended, f"resumed from {self.files(step)[0]} at step {step}")]

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        if step % self.shape.log_every:
            return []
        return [self._line(at, f"step {step}/{self.shape.total} loss {loss_at(step):.4f} ({seconds:.3f} s/step)")]

    def saving(self, began: float, ended: float, step: int) -> list[Line]:
        return [self._line(ended, f"saved {self.files(step)[0]}")]

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        return [self._line(began, "evaluating"), self._line(ended, f"eval loss {loss_at(step):.4f}")]

    def finished(self, at: float) -> list[Line]:
        return [self._line(at, "training finished")]

    def files(self, step: int) -> list[str]:
        return [f"checkpoints/step_{step:08}.pt"]


class PlainWithoutClock(Plain):
    """Steps and losses, nothing else: no time, and no duration."""

    name, clocked = "plain without times", False

    def step(self, at: float, step: int, seconds: float) -> list[Line]:
        return [] if step % self.shape.log_every else [(at, f"step {step} loss {loss_at(step):.4f}")]

    def evaluating(self, began: float, ended: float, step: int) -> list[Line]:
        return [(ended, f"step {step} val_loss {loss_at(step):.4f}")]

    def files(self, step: int) -> list[str]:
        return [f"checkpoints/model_{step}.pt"]


FORMATS: tuple[type[Format], ...] = (
    HuggingFace, Lightning, NanoGPT, Megatron, DeepSpeed, TorchTitan, Plain, PlainWithoutClock,
)  # fmt: skip
