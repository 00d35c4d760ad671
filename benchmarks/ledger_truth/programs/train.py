"""A small training program with hpcinit. Its plan, a JSON file, contains all durations and faults."""
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
import record


class SlowState:
    """A loader whose state takes a while to save and to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, int]:
        time.sleep(self.seconds)
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        time.sleep(self.seconds / 2)


class Checkpoints:
    """run.save and run.load, or the program's own file, or nothing."""

    def __init__(self, run: Any, wrapped: Any, plan: dict[str, Any]) -> None:
        self.run, self.wrapped, self.how = run, wrapped, plan["save"]
        self.loader = SlowState(plan["save_s"])
        self.own = Path("own.json")

    def load(self) -> int:
        """Return the step to continue from."""
        if self.how in ("run", "async"):
            record.mark("load+")
            loaded = self.run.load(self.wrapped, "checkpoints", loader=self.loader)
            record.mark("load-")
            return loaded.step if loaded else 0
        if self.how == "own" and self.own.exists():
            return int(json.loads(self.own.read_text())["step"])
        return 0

    def save(self, step: int) -> None:
        """Save. The program's own save is no save for hpcinit: it is in the next step."""
        if self.how in ("run", "async"):
            record.mark("save+")
            self.run.save(self.wrapped, "checkpoints", step, keep=2, loader=self.loader, wait=self.how == "run")
            record.mark("save-")
        elif self.how == "own" and self.run.rank == 0:
            time.sleep(0.1)
            temporary = self.own.with_suffix(".new")
            temporary.write_text(json.dumps({"step": step}))
            temporary.rename(self.own)


def loop(run: Any, wrapped: Any, plan: dict[str, Any]) -> None:
    """Train until the end of the plan or a stop."""
    import torch
    import torch.distributed as dist

    saved = Checkpoints(run, wrapped, plan)
    first = saved.load() + 1
    faults = [fault | {"rank": fault["rank"] % run.world_size} for fault in plan["faults"]]
    for step in range(first, plan["total"] + 1):
        time.sleep(plan["step_s"] * (0.9 + 0.2 * ((step * 7919) % 100) / 100))
        if step == first:
            time.sleep(plan["first_step_s"])
        record.fail(faults, step, run.rank)
        if wrapped is not None:
            wrapped.backward(wrapped(torch.randn(4, 8)).square().mean())
            wrapped.step()
        dist.all_reduce(torch.ones(1))
        at = time.time()
        run.progress(step, plan["total"])
        record.mark("step", at, step=step)
        if plan["phase_every"] and step % plan["phase_every"] == 0:
            record.mark("phase+")
            with run.phase("evaluating"):
                time.sleep(plan["phase_s"])
            record.mark("phase-")
        stop = run.should_stop() if plan["should_stop"] else None
        if stop or step % plan["save_every"] == 0:
            saved.save(step)
        if stop:
            break
    record.mark("done")
    time.sleep(plan["tail_s"])


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    record.begin(FIRST, rank)
    time.sleep(plan["import_s"] * (1 + 0.3 * rank))
    import torch

    import hpcinit

    torch.set_num_threads(1)
    record.mark("init_call")
    with hpcinit.session() as run:
        record.mark("init")
        wrapped = None
        if plan["wrap"]:
            time.sleep(plan["build_s"])
            model = torch.nn.Linear(8, 1)
            wrapped = run.wrap(model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
            record.mark("wrap")
        try:
            loop(run, wrapped, plan)
        except BaseException:
            record.mark("raised")
            raise


if __name__ == "__main__":
    main()
