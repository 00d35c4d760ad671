"""A stop and a resume on the device, with dropout drawing from its generator: the losses are the same, bit by bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from hpcinit.base.versions import installed
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Comm, Training
from tests.gpu import starting
from tests.gpu.findings import MISSING, Findings
from tests.gpu.starting import Job, Started, training

STEPS, SAVED = 8, 4
AT_ONCE = 3  # rows that share the GPU
SHARDED = Layout(dp_replicate=1, dp_shard=-1)
Row = tuple[str, Training, int, Layout]
ROWS: tuple[Row, ...] = (
    ("one rank", training(), 1, SHARDED),
    ("DDP, 2 ranks over gloo", training(), 2, Layout(dp_replicate=-1)),
    ("FSDP2 bf16", training("fsdp", "bf16"), 1, SHARDED),
    ("ZeRO 2 bf16", training("deepspeed", "bf16", deepspeed={"zero_stage": 2}), 1, SHARDED),
    ("ZeRO 3 bf16", training("deepspeed", "bf16", deepspeed={"zero_stage": 3}), 1, SHARDED),
)


def main(found: Findings, folder: Path) -> None:
    rows = []
    for row in ROWS:
        if row[1].wrap == "deepspeed" and not installed("deepspeed"):
            found.add(row[0], MISSING, "deepspeed is not installed in this Python")
        else:
            rows.append(row)
    with ThreadPoolExecutor(1 if found.cpu else AT_ONCE) as pool:
        for (name, *_), runs in zip(rows, pool.map(partial(_runs, folder), rows), strict=True):
            failed = next((done for done in runs.values() if not done.ok), None)
            if found.claim(f"{name}: save, stop and resume", failed is None, failed.tail() if failed else ""):
                _compare(found, name, {part: done.first for part, done in runs.items()})


def _runs(folder: Path, row: Row) -> dict[str, Started]:
    """Run without interruption, then save and stop, then resume. Stop after the first failure."""
    name, how, ranks, layout = row
    place, runs = folder / "".join(letter if letter.isalnum() else "-" for letter in name), {}
    for part, until in (("whole", STEPS), ("stopped", SAVED), ("resumed", STEPS)):
        checkpoints = "" if part == "whole" else str(place / "checkpoints")
        job = Job(
            "tests.gpu.check_checkpoints:train", ranks=ranks, args={"until": until, "checkpoints": checkpoints},
            training=how, layout=layout, comm=Comm(backend="gloo") if ranks > 1 else Comm(),
        )  # fmt: skip
        runs[part] = starting.run(job, place / part)
        if not runs[part].ok:
            break
    return runs


def _compare(found: Findings, name: str, runs: dict[str, Any]) -> None:
    whole, stopped, resumed = (runs[part]["losses"] for part in ("whole", "stopped", "resumed"))
    found.claim(
        f"{name}: the same start gives the same losses", stopped == whole[:SAVED], _first_difference(stopped, whole)
    )
    after = whole[SAVED:]
    found.claim(f"{name}: the resumed losses are bit-identical", resumed == after, _first_difference(resumed, after))
    found.claim(f"{name}: every generator's state is restored", runs["resumed"]["random"])
    draws = [runs[part]["draw"] for part in ("whole", "resumed")]
    found.claim(f"{name}: the device draws the same number afterwards", draws[0] == draws[1], str(draws), device=True)


def _first_difference(one: list[str], other: list[str]) -> str:
    """Return the first difference of the losses, which are in float.hex, without rounding."""
    for step, (a, b) in enumerate(zip(one, other, strict=False), 1):
        if a != b:
            apart = abs(float.fromhex(a) - float.fromhex(b))
            return f"step {step} differs by {apart:g}: {float.fromhex(a)!r} and {float.fromhex(b)!r}"
    return f"{len(one)} losses, the last {float.fromhex(one[-1])!r}"


# In the rank:


def train(until: int, checkpoints: str) -> dict[str, Any]:
    """Train to step `until` from the newest checkpoint, if there is one, and save at SAVED."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    import hpcinit
    from hpcinit.jobs.train_gpt import Place

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.2)

        def forward(self, x: Any) -> Any:
            return x + self.dropout(self.down(F.gelu(self.up(x))))

    with hpcinit.session(deterministic=True, seed=7) as run:
        model = nn.Sequential(nn.Linear(32, 64), nn.Sequential(*(Block(64) for _ in range(3))), nn.Linear(64, 8))
        wrapped = run.wrap(model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        place = Place(run.loader_options()["generator"])
        loaded = run.load(wrapped, checkpoints, loader=place) if checkpoints else None
        dtype = torch.bfloat16 if run.training.wrap == "deepspeed" else torch.float32
        losses = []
        for step in range(loaded.step + 1 if loaded else 1, until + 1):
            x = torch.randn(16, 32, generator=place.generator).to(run.device)
            loss = F.cross_entropy(wrapped(x.to(dtype)), x[:, :8].argmax(1))
            wrapped.backward(loss)
            wrapped.step()
            losses.append(loss.item().hex())
            if checkpoints and step == SAVED and not loaded:
                run.save(wrapped, checkpoints, step, loader=place)
        draw = torch.rand(1, device=run.device).item().hex()
        random = loaded.random if loaded else False
    return {"losses": losses, "draw": draw, "random": random}
