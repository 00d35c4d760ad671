"""A small distributed program without hpcinit, which prints as a common trainer does. Its plan is a JSON file."""
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
import formats
import record


def number(*names: str) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def show(lines: list[formats.Line]) -> None:
    """Print on rank 0."""
    if number("RANK", "SLURM_PROCID") == 0:
        for _, text in lines:
            print(text, end="" if text.startswith("\r") else "\n", flush=True)


def newest(form: formats.Format) -> int:
    """Return the step of the last checkpoint, from the file that each save replaces."""
    latest = Path("state.json")
    return int(json.loads(latest.read_text())["step"]) if latest.exists() else 0


def save(form: formats.Format, plan: dict[str, Any], step: int) -> None:
    record.mark("save+")
    began = time.time()
    if number("RANK", "SLURM_PROCID") == 0:
        lines = form.saving(began, began, step)
        show(lines[:1] if len(lines) > 1 else [])
        paths = form.files(step)
        for name in paths:
            time.sleep(plan["save_s"] / len(paths))
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("x" * 1000)
        Path("state.json").write_text(json.dumps({"step": step}))
        lines = form.saving(began, time.time(), step)
        show(lines[1:] if len(lines) > 1 else lines)
    record.mark("save-")


def train(form: formats.Format, plan: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank, first = dist.get_rank(), newest(form) + 1
    if first > 1:
        record.mark("load+")
        began = time.time()
        lines = form.loading(began, began, first - 1)
        show(lines[:1] if len(lines) > 1 else [])
        time.sleep(plan["load_s"])
        lines = form.loading(began, time.time(), first - 1)
        show(lines[1:] if len(lines) > 1 else lines)
        record.mark("load-")
    show(form.loop(time.time(), first - 1))
    before = time.time()
    for step in range(first, plan["total"] + 1):
        time.sleep(plan["step_s"] * (0.9 + 0.2 * ((step * 7919) % 100) / 100))
        if step == first:
            time.sleep(plan["first_step_s"])
        record.fail(plan["faults"], step, rank)
        dist.all_reduce(torch.ones(1))
        now = time.time()
        record.mark("step", now, step=step)
        show(form.step(now, step, now - before))
        if plan["phase_every"] and step % plan["phase_every"] == 0:
            record.mark("phase+")
            began = time.time()
            time.sleep(plan["phase_s"])
            show(form.evaluating(began, time.time(), step))
            record.mark("phase-")
        if step % plan["save_every"] == 0:
            save(form, plan, step)
            dist.barrier()
        before = time.time()
    record.mark("done")
    show(form.finished(time.time()))
    time.sleep(plan["tail_s"])


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = number("RANK", "SLURM_PROCID")
    record.begin(FIRST, rank)
    kind = next(each for each in formats.FORMATS if each.name == plan["format"])
    ranks = number("WORLD_SIZE", "SLURM_NTASKS")
    form = kind(formats.Shape(plan["total"], ranks, plan["log_every"], max(5, plan["total"] // 3), plan["step_s"]))
    time.sleep(plan["import_s"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    show(form.imported(time.time()))
    record.mark("init_call")
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(ranks))
    dist.init_process_group("gloo")
    record.mark("init")
    time.sleep(plan["build_s"])
    show(form.built(time.time()))
    record.mark("wrap")
    try:
        train(form, plan)
    except BaseException:
        record.mark("raised")
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
