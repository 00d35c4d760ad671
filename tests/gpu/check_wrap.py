"""run.wrap on the device: 20 steps of train_gpt under each wrapper, its losses compared with a CPU's, and its peak memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpcinit.base.versions import installed
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Comm, Training
from tests.gpu import starting
from tests.gpu.check_ops import there
from tests.gpu.findings import MISSING, NEEDS_GPU, NOT_SHOWN, Findings
from tests.gpu.starting import Job, Started, training

STEPS = 20
# The largest difference of a loss to the CPU's at any of the steps; losses go from about 4.6 to 2.5. In fp32 the order of
# sums differs and Adam amplifies that; bf16 has 8 bits of mantissa.
TOLERANCE = {"fp32": 0.002, "bf16": 0.02}
AT_ONCE = 4  # configurations that share the GPU; memory is counted per process


@dataclass(frozen=True)
class Row:
    """One configuration. fused: torch's fused AdamW. needs: some of 'deepspeed', 'compiler', 'nvcc' and 'gpu'."""

    name: str
    training: Training
    ranks: int = 1
    fused: bool = False
    needs: tuple[str, ...] = ()
    layout: Layout = field(default_factory=lambda: Layout(dp_replicate=1))


def zero(stage: int, param: str = "fp32", **more: Any) -> Training:
    return training("deepspeed", param, deepspeed={"zero_stage": stage, **more})


SHARDED = Layout(dp_replicate=1, dp_shard=-1)
RING = Layout(dp_replicate=1, cp=2, cp_kind="ring")
OFFLOAD = {"offload_optimizer": "cpu"}
ROWS = (
    Row("one rank fp32", training()),
    Row("DDP fp32, 2 ranks over gloo", training(), ranks=2, layout=Layout(dp_replicate=-1)),
    Row("one rank bf16", training(param="bf16")),
    Row("fused AdamW fp32", training(), fused=True),
    Row("activation checkpointing fp32", training(activation_checkpointing="full")),
    Row("torch.compile fp32", training(compile=True), needs=("compiler",)),
    Row("FSDP2 fp32", training("fsdp"), layout=SHARDED),
    Row("FSDP2 bf16", training("fsdp", "bf16"), layout=SHARDED),
    Row("FSDP2 bf16, checkpointing, torch.compile, fused AdamW", training("fsdp", "bf16", activation_checkpointing="full", compile=True), fused=True, needs=("compiler",), layout=SHARDED),
    *(Row(f"ZeRO {stage} fp32", zero(stage), needs=("deepspeed",), layout=SHARDED) for stage in range(4)),
    Row("ZeRO 0 bf16", zero(0, "bf16"), needs=("deepspeed",), layout=SHARDED),
    Row("ZeRO 2 bf16", zero(2, "bf16"), needs=("deepspeed",), layout=SHARDED),
    Row("ZeRO 3 bf16", zero(3, "bf16"), needs=("deepspeed",), layout=SHARDED),
    Row("ZeRO 2 bf16, optimizer offloaded", zero(2, "bf16", **OFFLOAD), needs=("deepspeed",), layout=SHARDED),
    *(Row(f"ZeRO {stage} bf16, DeepCompile", zero(stage, "bf16", deepcompile=True), needs=("gpu", "deepspeed", "compiler", "nvcc"), layout=SHARDED) for stage in (1, 3)),
    *(Row(f"ring attention {param}, 2 ranks over gloo", training(param=param), ranks=2, layout=RING) for param in ("fp32", "bf16")),
    Row("ring attention with ZeRO 2 bf16, 2 ranks over gloo", zero(2, "bf16"), ranks=2, needs=("deepspeed",), layout=RING),
    Row("ZeRO 3 bf16, all offloaded", zero(3, "bf16", offload_param="cpu", **OFFLOAD), needs=("deepspeed",), layout=SHARDED),
)  # fmt: skip


def main(found: Findings, folder: Path) -> None:
    # The references run on CPUs, also on a machine with a GPU: the same weights and the same batches.
    references = {
        ranks: starting.run(job(Row("reference", training(), ranks, layout=Layout(dp_replicate=-1)), cpu=True), folder / f"cpu-{ranks}")
        for ranks in (1, 2)
    }  # fmt: skip
    for ranks, done in references.items():
        name = f"the reference on CPUs, {ranks} rank{'s' * (ranks > 1)}, fp32"
        if not found.claim(name, done.ok, span(done.first["losses"]) if done.ok else done.tail()):
            return
    possible = [row for row in ROWS if _possible(found, row)]
    with ThreadPoolExecutor(1 if found.cpu else AT_ONCE) as pool:
        for row, done in pool.map(partial(_start, folder), possible):
            judge(found, row, done, references[row.ranks // row.layout.cp].first["losses"])


def _possible(found: Findings, row: Row) -> bool:
    compiler = shutil.which("g++") or shutil.which("gcc")
    reasons = {
        "gpu": (found.cpu, NEEDS_GPU, "torch and DeepSpeed do this on a GPU only"),
        "deepspeed": (not installed("deepspeed"), MISSING, "deepspeed is not installed in this Python"),
        "compiler": (not compiler, NOT_SHOWN, "torch.compile needs a C compiler, and neither g++ nor gcc is on PATH"),
        "nvcc": (not there("nvcc"), NOT_SHOWN, "DeepSpeed compiles an op for it, and nvcc was not found"),
    }
    for name in row.needs:
        lacking, status, reason = reasons[name]
        if lacking:
            found.add(row.name, status, reason)
            return False
    if "compiler" in row.needs and not found.cpu and not installed("triton"):
        found.add(row.name, MISSING, "torch.compile needs triton for a GPU, and it is not installed")
        return False
    return True


def job(row: Row, cpu: bool = False, limit_s: float = 200) -> Job:
    """Run a row. Two ranks share the GPU, which NCCL refuses, so they use gloo."""
    return Job(
        "tests.gpu.check_wrap:train",
        ranks=row.ranks,
        args={"fused": row.fused},
        env={"CUDA_VISIBLE_DEVICES": ""} if cpu else {},
        training=row.training,
        layout=row.layout,
        comm=Comm(backend="gloo") if row.ranks > 1 else Comm(),
        limit_s=limit_s,
    )


def _start(folder: Path, row: Row) -> tuple[Row, Started]:
    name = "".join(letter if letter.isalnum() else "-" for letter in row.name)
    return row, starting.run(job(row), folder / name)


def judge(found: Findings, row: Row, done: Started, expected: Sequence[float]) -> None:
    """Compare the losses of all steps with the reference. On CPUs the numbers show nothing about a GPU."""
    if not found.claim(f"{row.name}: {STEPS} steps", done.ok, "" if done.ok else done.tail()):
        return
    losses, most = done.first["losses"], TOLERANCE[row.training.precision.param]
    apart = [abs(one - other) for one, other in zip(losses, expected, strict=True)]
    memory = f"peak {done.first['peak_mb']:,.1f} MiB allocated" if done.first["peak_mb"] else "no peak on a CPU"
    detail = f"{span(losses)}; at most {max(apart):.4f} from the CPU's, first step {apart[0]:.6f}; {memory}"
    close = max(apart) <= most
    found.claim(
        f"{row.name}: losses within {most:g} of the CPU's", close, detail, losses=losses, peak_mb=done.first["peak_mb"]
    )
    found.claim(
        f"{row.name}: it ran on the device", done.first["device"].startswith("cuda"), done.first["device"], device=True
    )


def span(losses: Sequence[float]) -> str:
    return f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"


# In the rank:


def train(fused: bool) -> dict[str, Any]:
    """Run train_gpt unchanged, and record the loss of each step."""
    import sys

    import torch

    import hpcinit
    from hpcinit.jobs import train_gpt
    from hpcinit.runtime.runtime import Runtime
    from tests.gpu import ring_on_cpus

    losses: list[float] = []
    progress = Runtime.progress

    def recorded(self: Any, step: int, total: int, **values: float) -> None:
        losses.append(values["loss"])
        progress(self, step, total, **values)

    Runtime.progress = recorded  # type: ignore[method-assign]
    if fused:
        plain = torch.optim.AdamW

        class FusedAdamW(plain):  # type: ignore[misc, valid-type]
            def __init__(self, parameters: Any, **options: Any) -> None:
                super().__init__(parameters, **{**options, "fused": True})

        torch.optim.AdamW = FusedAdamW  # type: ignore[misc]
    sys.argv = ["train_gpt", "--steps", str(STEPS), "--eval-every", "1000"]
    options = train_gpt.arguments()
    with hpcinit.session() as run:
        on_gpu = run.device.type == "cuda"
        on_cpus = run.layout.cp_kind == "ring" and not on_gpu
        if on_cpus:
            ring_on_cpus.install()
        train_gpt.train(run, options)
        if on_cpus and not all(ring_on_cpus.calls.values()):
            raise RuntimeError(f"torch's ring attention did not run: {ring_on_cpus.calls}")
        peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
        found = {"losses": losses, "peak_mb": peak, "device": str(run.device)}
    return found
