"""The demo: a small character-level GPT, trained on the source of Python's standard library.

    hpcinit submit nodes=2 ranks_per_node=2 job=train_gpt wait=true
    hpcinit submit nodes=2 ranks_per_node=2 job=train_gpt wait=true parallel=fsdp

`train` contains everything that a program with several ranks needs: the session, run.wrap, different batches for each
data parallel rank, and numbers that are averaged before rank 0 prints them.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import hpcinit

VOCABULARY = bytes([10, *range(32, 127)])  # newline and printable ASCII; other characters are skipped
HELD_OUT = 0.1  # the last part of the text is for evaluation only
EVAL_PIECES = 16  # pieces of the held-out text that each rank evaluates


def read_modules(folder: Path) -> Tensor:
    """Return the source of the modules in `folder` as token numbers (uint8), in alphabetical order.

    Modules named _sysconfig* or site* are skipped, because they differ between installations.
    """
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith(("_sysconfig", "site")))
    source = b"".join(path.read_bytes() for path in files)
    if not source:
        raise SystemExit(
            f"{folder} has no .py files to train on: use a Python that includes the source of its standard library"
        )
    number = bytes(max(VOCABULARY.find(byte), 0) for byte in range(256))
    others = bytes(set(range(256)) - set(VOCABULARY))
    return torch.frombuffer(bytearray(source.translate(number, others)), dtype=torch.uint8)


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each with a layer norm before and a residual connection.

    The rows of `qkv` are ordered by head, so that each rank of a tensor parallel group gets whole heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, -1, 3, self.head_width)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_2(x))


class GPT(nn.Module):
    """A small GPT that predicts each next token.

    The input is token numbers (batch, length), and the output is logits (batch, length, vocabulary).

    positions: the positions of the tokens in the text, with shape (length,); default: 0, 1, ...
    """

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(VOCABULARY), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(VOCABULARY), bias=False)
        nn.init.normal_(self.position.weight, std=0.1)  # the token matters more than its position
        nn.init.normal_(self.head.weight, std=0.02)  # small logits: the first loss is that of random guessing

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))


# Layers that a tensor parallel group divides: by output, then by input, with one sum over the ranks after each pair.
TENSOR_PARALLEL: dict[str, ParallelStyle] = {
    "blocks.*.qkv": ColwiseParallel(),
    "blocks.*.out": RowwiseParallel(),
    "blocks.*.feed_forward.0": ColwiseParallel(),
    "blocks.*.feed_forward.2": RowwiseParallel(),
}


def loss_at(run: hpcinit.Runtime, model: Callable[..., Tensor], text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return the mean loss over this rank's part of the pieces of `text` that start at `starts`.

    context: the length of a piece in tokens.
    """
    pieces = text[starts[:, None] + torch.arange(context + 1)].long().to(run.device)
    tokens, targets = run.shard_sequence(pieces[:, :-1], pieces[:, 1:])
    (positions,) = run.shard_sequence(torch.arange(context, device=run.device), dim=0)
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean of `value` over all ranks, so that every rank makes the same decision."""
    if dist.is_initialized():
        value = value.detach().clone()
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def same_on_all_ranks(value: Tensor) -> bool:
    """Return whether the whole number `value` is equal on all ranks."""
    ends = torch.stack([value, -value])
    if dist.is_initialized():
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    return bool(ends[0] == -ends[1])


def checksum(model: nn.Module) -> Tensor:
    """Return a checksum of the bits of all parameters. Even a rounding error changes the checksum."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.stack([p.detach().float().view(torch.int32).sum() for p in whole]).sum()


def read_text(run: hpcinit.Runtime, folder: Path) -> tuple[Tensor, Tensor]:
    """Return the text to train on and the text to evaluate on. Every rank gets the same texts."""
    text = read_modules(folder)
    if not same_on_all_ranks(text.long().sum().to(run.device)):
        raise SystemExit("the training text differs between the ranks: run the same Python version on all nodes")
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


@torch.no_grad()
def evaluate(run: hpcinit.Runtime, model: Callable[..., Tensor], text: Tensor, context: int) -> float:
    """Return the mean loss on pieces spread over `text`. Each data parallel rank evaluates different pieces.

    context: the length of a piece in tokens.
    """
    shares = run.layout.data_parallel
    starts = torch.linspace(0, len(text) - context - 1, EVAL_PIECES * shares).long()
    return mean_over_ranks(loss_at(run, model, text, starts[run.data_rank :: shares], context))


class Place:
    """A data parallel rank's position in the data. Each checkpoint contains it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def train(run: hpcinit.Runtime, options: argparse.Namespace) -> None:
    """Train the model. Rank 0 prints the progress. Exit with a message and status 1 if the loss did not decrease."""
    text, held_out = read_text(run, Path(sysconfig.get_path("stdlib")))
    gpt = GPT(options.context, options.width, options.layers, options.heads)
    size = sum(parameter.numel() for parameter in gpt.parameters())
    # DDP, FSDP or DeepSpeed, over the ranks as the config divides them: parallel=fsdp, parallel.tp=2, ...
    wrapped = run.wrap(
        gpt,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.lr),
        tp_plan=TENSOR_PARALLEL if run.layout.tp > 1 else None,
    )
    rate = warm_up_and_cosine(options.steps)
    # Ranks with different data shares need different batches, so each share has its own generator.
    generator = run.loader_options()["generator"]
    folder = run.folder / "checkpoints" if run.folder and options.save_every else None
    loaded = run.load(wrapped, folder, loader=Place(generator)) if folder else None
    losses: list[float] = loaded.extra if loaded else []
    tokens = run.batch.data_parallel * run.batch.accumulation * options.micro_batch * options.context
    if run.rank == 0:
        print(f"{size:,} parameters, {len(text):,} characters of text, {tokens:,} characters per step", flush=True)

    started, first = time.monotonic(), len(losses)
    for step in range(first + 1, options.steps + 1):
        for group in wrapped.optimizer.param_groups if wrapped.optimizer else ():
            group["lr"] = options.lr * rate(step - 1)
        passes = []
        for _ in range(run.batch.accumulation):
            starts = torch.randint(len(text) - options.context, (options.micro_batch,), generator=generator)
            passes.append(loss_at(run, wrapped, text, starts, options.context))
            wrapped.backward(passes[-1])
            wrapped.step()  # makes the optimizer's step after the last accumulation pass
        mean = mean_over_ranks(torch.stack(passes).mean())
        losses.append(mean)
        if not math.isfinite(mean):
            raise SystemExit(f"the loss is {mean} at step {step}; try a smaller --lr than {options.lr:g}")
        run.progress(step, options.steps, loss=mean)
        if step in {1, options.steps} or step % options.eval_every == 0:
            speed = (step - first) * tokens / (time.monotonic() - started)
            unseen = evaluate(run, wrapped, held_out, options.context)
            if run.rank == 0:
                line = f"step {step:4d}  loss {mean:.3f}  held-out {unseen:.3f}  {speed:,.0f} tokens/s"
                print(line, flush=True)
        if folder and step % options.save_every == 0 and step < options.steps:
            run.save(wrapped, folder, step, loader=Place(generator), extra=losses, keep=2)
    finish(run, gpt, losses, unseen)


def warm_up_and_cosine(steps: int) -> Callable[[int], float]:
    """Return a function that computes the factor of the learning rate from the step.

    The factor rises in the first tenth of the steps, then falls to zero.
    """
    first = max(1, steps // 10)
    return lambda step: min((step + 1) / first, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def finish(run: hpcinit.Runtime, gpt: GPT, losses: list[float], unseen: float) -> None:
    """Check the result of the training run. Rank 0 prints it as its last line.

    unseen: the loss on text that was not used for training.
    """
    if not same_on_all_ranks(checksum(gpt)):
        raise SystemExit(
            "the parameters differ between the ranks after training: check the nodes with hpcinit doctor nodes=N"
        )
    result = f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {len(losses)} steps, held-out {unseen:.2f}"
    if run.rank == 0:
        print(result, flush=True)
    if losses[-1] >= losses[0]:
        raise SystemExit(f"the loss did not go down: {result}; try a smaller --lr or more --steps")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("train_gpt", description="Train a small GPT on Python's source.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--micro-batch", type=int, default=8, help="pieces of text per rank and step")
    parser.add_argument("--context", type=int, default=128, help="length of a piece in characters")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--eval-every", type=int, default=10, help="steps between two lines of output")
    parser.add_argument("--save-every", type=int, default=0, help="steps between two checkpoints; 0: none")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: expected at least 2, or the loss cannot go down")
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not divisible by --heads {options.heads}")
    return options


def main() -> None:
    options = arguments()
    with hpcinit.session() as run:
        train(run, options)


if __name__ == "__main__":
    main()
