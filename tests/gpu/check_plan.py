"""The memory that `hpcinit plan` predicts, compared with torch's allocator, for three sizes of one model.

The formulas are those of the command (records/memory.py, submit/plan_command.py); the command itself needs Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcinit.base.versions import installed
from hpcinit.records import memory, wrappers
from hpcinit.records.layout import Layout
from hpcinit.records.memory import ALWAYS, GPU, PASS, STEP, Demand, Part, Zero
from hpcinit.records.spec import Samples
from hpcinit.submit import plan_command
from tests.gpu import starting
from tests.gpu.findings import MISSING, NEEDS_GPU, NOT_SHOWN, Findings
from tests.gpu.starting import Job, Started, training

GB = 1e9
WITHIN = 0.15
MICRO = 4
ALONE = Layout(dp_replicate=1, dp_shard=1)
LARGEST_GB = 26.0  # a process with the largest size, with a margin
# The formulas count these parts in full, but they can be smaller: gradients and activations are never whole at the same time, and
# buffers are not larger than the model.
BUFFERS = ("reduce bucket", "all-reduce bucket", "gathered parameters", "unsharded blocks")


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    context: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width}"


SIZES = (Size(768, 6, 512), Size(1024, 16, 512), Size(2048, 16, 512))
SIZES_CPU = (Size(64, 2, 32), Size(96, 2, 32), Size(128, 2, 32))


@dataclass(frozen=True)
class Row:
    """One configuration. zero: None without DeepSpeed."""

    name: str
    wrap: str
    param: str
    fused: bool = False
    checkpointing: bool = False
    zero: Zero | None = None


ROWS = (
    Row("one rank fp32", "ddp", "fp32"),
    Row("one rank bf16", "ddp", "bf16"),
    Row("one rank bf16, fused AdamW", "ddp", "bf16", fused=True),
    Row("one rank bf16, fused AdamW, checkpointing", "ddp", "bf16", fused=True, checkpointing=True),
    Row("FSDP2 bf16, fused AdamW", "fsdp", "bf16", fused=True),
    Row("FSDP2 bf16, fused AdamW, checkpointing", "fsdp", "bf16", fused=True, checkpointing=True),
    *(Row(f"ZeRO {stage} bf16", "deepspeed", "bf16", fused=True, zero=Zero(stage)) for stage in range(4)),
    Row("ZeRO 2 bf16, optimizer offloaded", "deepspeed", "bf16", fused=True, zero=Zero(2, offload_optimizer="cpu")),
    Row("ZeRO 3 bf16, all offloaded", "deepspeed", "bf16", fused=True, zero=Zero(3, "cpu", "cpu")),
)


def main(found: Findings, folder: Path) -> None:
    total = _total_gb(found, folder)
    sizes: Sequence[Size] = SIZES_CPU
    if not found.cpu:
        sizes = SIZES if total >= LARGEST_GB else SIZES[:2]
    for size in SIZES[len(sizes) :] if not found.cpu else ():
        found.add(f"{size}", NOT_SHOWN, f"it needs a GPU with {LARGEST_GB:.0f} GB, and this one has {total:.0f} GB")
    rows = []
    for row in ROWS:
        if row.zero and not installed("deepspeed"):
            found.add(row.name, MISSING, "deepspeed is not installed in this Python")
        else:
            rows.append(row)
    at_once = 1 if found.cpu else max(1, min(3, int(total // LARGEST_GB)))
    with ThreadPoolExecutor(at_once) as pool:
        for row, done in pool.map(partial(_start, folder, sizes), rows):
            if not found.claim(f"{row.name}: trains in each size", done.ok, "" if done.ok else done.tail()):
                continue
            for size, measured in zip(sizes, done.first, strict=True):
                compare(found, row, size, measured)


def _total_gb(found: Findings, folder: Path) -> float:
    if found.cpu:
        return 0.0
    return float(starting.run(Job("tests.gpu.check_plan:total_gb"), folder / "total").first)


def _start(folder: Path, sizes: Sequence[Size], row: Row) -> tuple[Row, Started]:
    deepspeed: dict[str, Any] = {}
    if row.zero:
        offload = {"offload_param": row.zero.offload_param, "offload_optimizer": row.zero.offload_optimizer}
        deepspeed = {"zero_stage": row.zero.stage, **offload}
    how = training(
        row.wrap, row.param, deepspeed=deepspeed, activation_checkpointing="full" if row.checkpointing else "none"
    )
    job = Job(
        "tests.gpu.check_plan:measure", args={"sizes": [vars(size) for size in sizes], "fused": row.fused},
        training=how, layout=ALONE, batch=Samples(micro=MICRO), limit_s=220,
    )  # fmt: skip
    name = "".join(letter if letter.isalnum() else "-" for letter in row.name)
    return row, starting.run(job, folder / name)


def predicted(row: Row, size: Size, parameters: int) -> list[Part]:
    """Return every part of a rank's memory in the order of submit/plan_command.py, the activations last."""
    zero = row.zero or Zero()
    demand = Demand(parameters, ALONE, row.wrap, row.param, fused=row.fused, layers=size.layers, zero=zero)
    shape = (size.layers, size.width, size.context, MICRO)
    kept = plan_command.activation_memory(*shape, ALONE, row.param, row.checkpointing)
    return [*wrappers.get(demand.wrap).memory(demand), Part("activations", kept, "", during=PASS)]


def lowest(parts: Sequence[Part]) -> int:
    """Return the same without buffers, and with the larger of gradients and activations instead of their sum."""
    kept = [part for part in parts if part.name not in BUFFERS]
    gradients = sum(part.bytes for part in kept if part.name == "gradients" and part.place == GPU)
    active = sum(part.bytes for part in kept if part.name == "activations")
    return memory.total(kept, GPU) - min(gradients, active)


def compare(found: Findings, row: Row, size: Size, measured: Mapping[str, Any]) -> None:
    """Record a pass within 15 %, or with the reason if the formula is an upper bound by design."""
    parts = predicted(row, size, measured["parameters"])
    expected = memory.total(parts, GPU)
    name = f"{row.name}, {measured['parameters'] / 1e6:.0f} million parameters ({size})"
    by_event = {
        when: sum(part.bytes for part in parts if part.place == GPU and part.during in {ALWAYS, when}) / GB
        for when in (ALWAYS, PASS, STEP)
    }
    if found.cpu:
        return found.add(name, NEEDS_GPU, f"predicted {expected / GB:.4f} GB; a CPU has no such allocator")
    peak = max(measured["pass"], measured["step"])
    ratio = peak / expected
    detail = (
        f"predicted {expected / GB:.2f} GB, measured {peak / GB:.2f} GB ({100 * (ratio - 1):+.0f} %); between steps "
        f"{by_event[ALWAYS]:.2f} and {measured['always'] / GB:.2f}, forward and backward {by_event[PASS]:.2f} and "
        f"{measured['pass'] / GB:.2f}, step {by_event[STEP]:.2f} and {measured['step'] / GB:.2f} GB; reserved "
        f"{measured['reserved'] / GB:.2f} GB; {measured['init'] / GB:.2f} GB during its creation"
    )
    values = {"predicted": expected, **measured}
    low = lowest(parts)
    if abs(ratio - 1) <= WITHIN:
        found.claim(f"{name}: within 15 %", True, detail, **values)
    elif (1 - WITHIN) * low <= peak <= expected:
        largest = {part.name: part.bytes for part in parts if part.name in (*BUFFERS, "gradients", "activations")}
        counted = ", ".join(f"{part} {size / GB:.2f} GB" for part, size in largest.items() if size > 0.02 * expected)
        why = f"below, as the formula is an upper bound: gradients and activations shrink and grow together, and buffers are counted whole ({counted}); without these {low / GB:.2f} GB"
        found.claim(f"{name}: below, with a reason", True, f"{detail}; {why}", **values)
    else:
        found.claim(
            f"{name}: within 15 % or with a reason",
            False,
            f"{detail}; lowest by the formula {low / GB:.2f} GB",
            **values,
        )
    return None


# In the rank:


def total_gb() -> float:
    """Return the memory of the GPU in 10^9 bytes."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GB


def measure(sizes: Sequence[Mapping[str, int]], fused: bool) -> list[dict[str, Any]]:
    """Return for each size the bytes at three points of the third step, above those before the model was created."""
    import hpcinit

    with hpcinit.session() as run:
        return [_one(run, Size(**size), fused) for size in sizes]


def _one(run: Any, size: Size, fused: bool) -> dict[str, Any]:
    import gc

    import torch
    import torch.nn.functional as F

    from hpcinit.jobs.train_gpt import GPT, VOCABULARY

    on_gpu = run.device.type == "cuda"

    def now() -> int:
        return torch.cuda.memory_allocated() if on_gpu else 0

    def peak() -> int:
        """Return the peak since the last call."""
        if not on_gpu:
            return 0
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return found

    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    peak()
    before = now()
    with run.device:
        model = GPT(size.context, size.width, size.layers, max(1, size.width // 64))
        tokens = torch.randint(len(VOCABULARY), (MICRO, size.context + 1))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    wrapped = run.wrap(model, optimizer=lambda group: torch.optim.AdamW(group, lr=1e-4, fused=fused or None))
    found: dict[str, Any] = {"parameters": parameters, "init": peak() - before}
    for _ in range(3):
        loss = F.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        wrapped.backward(loss)
        del loss
        found["pass"] = peak() - before
        wrapped.step()
        found["step"] = peak() - before
        found["always"] = now() - before
    found["reserved"] = torch.cuda.max_memory_reserved() if on_gpu else 0
    found["left_before"] = before
    if hasattr(wrapped, "engine"):
        wrapped.engine.destroy()
    del wrapped, model, tokens
    gc.collect()
    return found
