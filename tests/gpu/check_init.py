"""hpcinit.init() with NCCL and one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcinit.base.versions import installed
from hpcinit.records import run_folder
from tests.gpu import device, starting
from tests.gpu.findings import MISSING, Findings
from tests.gpu.starting import Job

START_S, COLLECTIVE_S = 77.0, 55.0  # unlike every default
CONTEXT_GB = 2.0  # submit/plan_command.py: CONTEXT, which needs Hydra to be imported


def main(found: Findings, folder: Path) -> None:
    which = device.identity()
    for policy in ("never", "auto", "always"):
        _policy(found, folder, policy)
    if installed("deepspeed"):
        _deepspeed(found, folder)
    else:
        found.add("DeepSpeed uses the same device", MISSING, "deepspeed is not installed in this Python")
    _memory(found, folder, which)


def _policy(found: Findings, folder: Path, policy: str) -> None:
    done = starting.run(Job("tests.gpu.check_init:bring_up", args={"policy": policy}), folder / policy)
    cpu_always = found.cpu and policy == "always"
    if cpu_always:
        refused = done.status != 0 and "comm.device_id=always does not work here" in done.output
        found.claim("device_id=always is refused on a CPU", refused, done.tail(200))
        found.claim("device_id=always binds the group to the device", False, device=True)
        return
    if not found.claim(f"init with device_id={policy} creates a group, twice", done.ok, "" if done.ok else done.tail()):
        return
    for number, one in enumerate(done.first["inits"], 1):
        name = f"device_id={policy}, init {number}"
        found.claim(f"{name}: an all-reduce is right", one["sum"] == 1.0, f"{one['backend']} on {one['device']}")
        found.claim(f"{name}: the backend is nccl", one["backend"] == "nccl", one["backend"], device=True)
        order = one["order"]
        before = order[:1] == ["set device"] and "init_process_group" in order
        found.claim(f"{name}: the device is current before the group is made", before, " -> ".join(order), device=True)
        bound = one["device"] if policy == "always" else None
        detail = f"bound to {one['bound']}; {one['line']}"
        found.claim(f"{name}: the group is bound to {bound or 'nothing'}", one["bound"] == bound, detail)
        times = one["start_s"], one["collective_s"]
        found.claim(
            f"{name}: both timeouts are in the backend's options", times == (START_S, COLLECTIVE_S),
            f"{times[0]} s while the group starts, {times[1]} s afterwards", start_s=times[0], collective_s=times[1],
        )  # fmt: skip
        found.claim(f"{name}: shutdown leaves no group", one["gone"])
        if policy == "never":
            found.measured(
                f"{name}: time", f"{one['seconds']:.2f} s, shutdown {one['down_s']:.2f} s", seconds=one["seconds"]
            )
    if policy == "auto":
        why = "a single rank has no peer" if not found.cpu else "gloo on a CPU has no device to bind to"
        startup = (folder / policy / run_folder.STARTUP).read_text()
        found.claim("device_id=auto gives its reason", why in startup, why)


def _deepspeed(found: Findings, folder: Path) -> None:
    done = starting.run(Job("tests.gpu.check_init:with_deepspeed"), folder / "deepspeed")
    if not found.claim("init(deepspeed=True) initializes DeepSpeed", done.ok, "" if done.ok else done.tail()):
        return
    one = done.first
    same = one["accelerator"] == one["device"]
    found.claim("DeepSpeed uses the same device", same, f"{one['accelerator']} and {one['device']}", device=True)
    found.claim(
        "DeepSpeed has adopted the group", one["initialized"] and one["group_size"] == 1, f"backend {one['backend']}"
    )
    found.claim("after shutdown DeepSpeed has no group", not one["after"])


def _memory(found: Findings, folder: Path, which: dict[str, str]) -> None:
    """Memory of the device by nvidia-smi, as the process goes through its stages, and after its end."""
    before = device.settled_mb(which)
    done = starting.run(Job("tests.gpu.check_init:memory_of_stages", args={"which": which}), folder / "memory")
    after = device.settled_mb(which)
    stages = {"before the process": before, **(done.first if done.ok else {}), "after the process": after}
    detail = ", ".join(f"{name} {value} MiB" for name, value in stages.items())
    found.measured("device memory around init and shutdown", detail, device=True, **stages)
    used = None if before is None or "init 1" not in stages or stages["init 1"] is None else stages["init 1"] - before
    detail = f"{used} MiB for the CUDA context and NCCL; hpcinit plan keeps {CONTEXT_GB:g} GB and 5 % of the GPU"
    found.claim(
        "the margin of hpcinit plan is enough",
        used is not None and used * 2**20 < CONTEXT_GB * 1e9,
        detail,
        device=True,
    )
    freed = before is not None and after is not None and after <= before + 16
    found.claim("the process leaves no memory in use", freed, f"{before} MiB before, {after} MiB after", device=True)


# In the rank:


def bring_up(policy: str) -> dict[str, Any]:
    """Call init and shutdown twice; return the order of torch's calls and the group's options."""
    import contextlib
    import io
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import hpcinit
    from hpcinit.runtime import process_group

    order: list[str] = []
    start_s: list[float] = []
    make, choose = dist.init_process_group, torch.accelerator.set_device_index

    def set_device(index: Any) -> None:
        order.append("set device")
        choose(index)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        order.append("init_process_group")
        make(*args, **kwargs)
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        start_s.append((process_group.timeout_of(device) or timedelta()).total_seconds())

    dist.init_process_group, torch.accelerator.set_device_index = init_process_group, set_device
    inits = []
    for _ in range(2):
        order.clear()
        began, log = time.monotonic(), io.StringIO()
        with contextlib.redirect_stderr(log):
            run = hpcinit.init(
                device_id=policy,
                timeout=timedelta(seconds=START_S),
                collective_timeout=timedelta(seconds=COLLECTIVE_S),
            )
        seconds = time.monotonic() - began
        print(log.getvalue(), flush=True)
        value = torch.ones(1, device=run.device)
        dist.all_reduce(value)
        found = process_group.timeout_of(run.device)
        bound = c10d._get_default_group().bound_device_id
        one = {
            "device": str(run.device), "backend": run.backend, "sum": value.item(), "order": list(order),
            "bound": None if bound is None else str(bound), "start_s": start_s[-1], "seconds": seconds,
            "collective_s": found.total_seconds() if found else None,
            "line": next((line for line in log.getvalue().splitlines() if "device_id" in line), "")[-160:],
        }  # fmt: skip
        began = time.monotonic()
        hpcinit.shutdown()
        inits.append({**one, "gone": not dist.is_initialized(), "down_s": time.monotonic() - began})
    return {"inits": inits}


def with_deepspeed() -> dict[str, Any]:
    """Return the device of DeepSpeed's accelerator, requested by LOCAL_RANK as DeepSpeed does."""
    import os

    import hpcinit

    run = hpcinit.init(deepspeed=True)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    found = {
        "device": str(run.device),
        "accelerator": accelerator.device_name(int(os.environ["LOCAL_RANK"])) if run.device.type != "cpu" else "cpu",
        "initialized": deepspeed.comm.is_initialized(),
        "backend": run.backend,
        "group_size": deepspeed.comm.get_world_size(),
    }
    hpcinit.shutdown()
    return {**found, "after": deepspeed.comm.is_initialized()}


def memory_of_stages(which: dict[str, str]) -> dict[str, float | None]:
    """Return the MiB in use on the device after each stage of this process."""
    found = {}
    import torch
    import torch.distributed as dist

    import hpcinit

    found["torch imported"] = device.used_mb(which)
    for number in (1, 2):
        run = hpcinit.init()
        dist.all_reduce(torch.ones(1, device=run.device))
        found[f"init {number}"] = device.used_mb(which)
        hpcinit.shutdown()
        found[f"shutdown {number}"] = device.used_mb(which)
    return found
