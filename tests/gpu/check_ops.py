"""DeepSpeed's ops: `hpcinit build-ops`, the first use of what it built, a killed compile and a lock that remains."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpcinit.base.versions import installed
from hpcinit.records.layout import Layout
from hpcinit.runtime import extension_locks, ops
from tests.gpu import starting
from tests.gpu.findings import MISSING, NOT_SHOWN, Findings
from tests.gpu.starting import Job, training

BUILD_S = 170.0
SAVED = 5  # the step of the checkpoint


def main(found: Findings, folder: Path) -> None:
    op, optimizer = ("cpu_adam", "with offload") if found.cpu else ("fused_adam", "on the device")
    if not installed("deepspeed"):
        return found.add(f"{op}: built, used, killed, locked", MISSING, "deepspeed is not installed in this Python")
    if lacking := [name for name in ("g++", "ninja", *(() if found.cpu else ("nvcc",))) if not there(name)]:
        why = f"{', '.join(lacking)} not found: an op for {'a CPU' if found.cpu else 'CUDA'} cannot be compiled here"
        return found.add(f"{op}: built, used, killed, locked", NOT_SHOWN, why)
    folder.mkdir()
    cache = folder / "cache"
    if not _killed(found, cache, op) or not _built(found, cache, op):
        return None
    (cache / op / extension_locks.TORCH_LOCK).touch()  # left by a killed rank: the jobs do not wait for it
    for stage in (2, 3):
        _used(found, folder, cache, op, optimizer, stage)
    return None


def there(name: str) -> bool:
    """Return the programs missing on PATH; nvcc is also searched where torch does."""
    places = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    return bool(shutil.which(name)) or (name == "nvcc" and any(Path(one, "bin/nvcc").exists() for one in places if one))


def _start(cache: Path, op: str) -> subprocess.Popen[str]:
    """Start `hpcinit build-ops` in a new session."""
    command = [sys.executable, "-u", "-m", "hpcinit", "build-ops", "--ops", op, "--into", str(cache)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _killed(found: Findings, cache: Path, op: str) -> bool:
    """Kill the build with SIGKILL as soon as torch's lock exists."""
    process = _start(cache, op)
    deadline = time.monotonic() + 60
    while not _locks(cache, op) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    there = bool(_locks(cache, op))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    detail = "" if there else f"no lock was made: {output[-600:]}"
    return found.claim(f"{op}: a killed compile leaves torch's lock", there and bool(_locks(cache, op)), detail)


def _locks(cache: Path, op: str) -> list[Path]:
    return list(cache.glob(f"{ops.PART}*/{op}/{extension_locks.TORCH_LOCK}"))


def _built(found: Findings, cache: Path, op: str) -> bool:
    began = time.monotonic()
    process = _start(cache, op)
    try:
        output, _ = process.communicate(timeout=BUILD_S * (3 if found.cpu else 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return found.claim(f"{op}: the next build ends", False, f"not after {BUILD_S:.0f} s")
    found.claim(f"{op}: the next build removes the unfinished one", not list(cache.glob(f"{ops.PART}*")), output[-400:])
    well = process.returncode == 0
    detail = f"{time.monotonic() - began:.0f} s" if well else output[-800:]
    return found.claim(f"{op}: build-ops builds it", well, detail)


def _used(found: Findings, folder: Path, cache: Path, op: str, optimizer: str, stage: int) -> None:
    """Check that a job whose config needs the op finds it built and compiles nothing. stage: of ZeRO."""
    offload = {"offload_optimizer": "cpu"} if found.cpu else {}
    how = training("deepspeed", "bf16", deepspeed={"zero_stage": stage, "optimizer": "adamw", **offload})
    job = Job(
        "tests.gpu.check_ops:train", args={"checkpoints": str(folder / f"checkpoints-{stage}")}, training=how, layout=Layout(dp_replicate=1, dp_shard=-1),
        env={"TORCH_EXTENSIONS_DIR": str(cache)},
    )  # fmt: skip
    done = starting.run(job, folder / f"use-{stage}")
    op = f"{op}, ZeRO {stage}"
    name = f"{op}: its first use {optimizer} trains"
    if not found.claim(name, done.ok, "" if done.ok else done.tail()):
        return
    falls = done.first["losses"][-1] < done.first["losses"][0]
    found.claim(f"{name}: the loss falls", falls, f"{done.first['optimizer']}, {done.first['losses']}")
    expected = "DeepSpeedCPUAdam" if found.cpu else "FusedAdam"
    found.claim(f"{name}: the optimizer is {expected}", done.first["optimizer"] == expected, done.first["optimizer"])
    same = done.first["resumed"] == done.first["losses"][SAVED:]
    found.claim(f"{op}: a checkpoint of its states resumes with the same losses", same, str(done.first["resumed"]))
    same = done.first["reloaded"] == done.first["losses"][SAVED:]
    found.claim(
        f"{op}: after offload_states() and reload_states() the losses are the same", same, str(done.first["reloaded"])
    )
    freed, model = (done.first[name] / 2**20 for name in ("freed", "model"))
    detail = (
        f"{freed:.1f} MiB; the parameters have {model:.1f} MiB in fp32; moved: {', '.join(done.first['offloaded'])}"
    )
    found.claim(f"{op}: offload_states() frees memory of the device", freed > model, detail, device=True)
    compiled = "(takes minutes); later jobs" in done.output
    found.claim(f"{op}: the job compiles nothing", not compiled, f"first step after {done.first['seconds']:.1f} s")


# In the rank:


def train(checkpoints: str) -> dict[str, Any]:
    """Run some steps with DeepSpeed's AdamW, the last ones again from a checkpoint, and again after an offload."""
    import torch
    from torch import nn

    import hpcinit

    began = time.monotonic()
    seconds = 0.0
    with hpcinit.session() as run:
        x = torch.randn(32, 256, device=run.device, dtype=torch.bfloat16)

        def wrapped() -> Any:
            torch.manual_seed(3)
            return run.wrap(nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1)))

        def steps(model: Any, number: int) -> list[float]:
            nonlocal seconds
            losses = []
            for _ in range(number):
                loss = (model(x) - 1).square().mean()
                model.backward(loss)
                model.step()
                losses.append(round(loss.item(), 4))
                seconds = seconds or time.monotonic() - began
            return losses

        def used() -> int:
            return torch.cuda.memory_allocated() if run.device.type == "cuda" else 0

        first = wrapped()
        losses = steps(first, SAVED)
        run.save(first, checkpoints, SAVED)
        losses += steps(first, SAVED)
        name = type(getattr(first.optimizer, "optimizer", first.optimizer)).__name__
        second, third = wrapped(), wrapped()
        run.load(second, checkpoints)
        resumed = steps(second, SAVED)
        run.load(third, checkpoints)
        before = used()
        third.offload_states()
        freed, offloaded = before - used(), sorted(third.offloaded)
        third.reload_states()
        reloaded = steps(third, SAVED)
        model = 4 * sum(getattr(each, "ds_numel", each.numel()) for each in third.model.parameters())  # ZeRO 3 divides
    return {
        "losses": losses, "seconds": seconds, "optimizer": name, "resumed": resumed, "reloaded": reloaded,
        "freed": freed, "offloaded": offloaded, "model": model,
    }  # fmt: skip
