"""A small training run on the real Slurm that saves, resumes and stops in time, with methods to observe it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import begin_now, state
from tests.submitting import folder_of, submit
from tests.waiting import until

EVERY = 5  # steps between two checkpoints
RANKS_PER_NODE = {"srun": 1, "fork": 2}  # with fork, a node has two ranks and a fork server
PROGRAM = """
import os, sys, time
import torch
import hpcinit
total, folder = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
last = int(os.environ["WORLD_SIZE"]) - 1
with hpcinit.session() as run:
    wrapped = run.wrap(torch.nn.Linear(64, 64), optimizer=lambda all: torch.optim.SGD(all, lr=0.001))
    folder = folder or run.folder / "checkpoints"
    loaded = run.load(wrapped, folder)
    for step in range(loaded.step + 1 if loaded else 1, total + 1):
        loss = wrapped(torch.ones(2, 64)).square().mean()
        wrapped.backward(loss)
        wrapped.step()
        if run.rank == last and os.path.exists("raise"): raise ValueError("bad sample 17")
        if run.rank == last and os.path.exists("eat"): kept = bytearray(1 << 30)
        if run.rank == 0: print("step", step, flush=True)
        run.progress(step, total)
        stop = run.should_stop()
        if stop or step % 5 == 0: run.save(wrapped, folder, step, keep=3)
        if stop: break
        time.sleep(0.01 if os.path.exists("quick") else 0.2)
"""
HEALTHY = re.compile("the job is (RUNNING|COMPLETING): nothing has failed")


@dataclass(frozen=True)
class Training:
    """A submitted training run. The files quick, raise and eat in the working folder control it.

    The faulty rank is the last one, on the second node.
    """

    hpcinit: Run
    slurm: MiniSlurm
    folder: Path
    saved: Path
    launch: str = "srun"

    @property
    def job(self) -> str:
        return str(json.loads((self.folder / "submission.json").read_text())["job_id"])

    @property
    def state(self) -> str:
        return state(self.slurm, self.job)

    @property
    def at_fault(self) -> str:
        return f"rank {2 * RANKS_PER_NODE[self.launch] - 1} on n2"

    def pid_at_fault(self) -> int:
        """Return the process of the rank at fault, which its title shows."""
        title = self.at_fault.removesuffix(" on n2") + "/"
        (found,) = (pid for pid, line in self.ranks("n2").items() if line.startswith(title))
        return found

    def ranks(self, *nodes: str) -> dict[int, str]:
        """Return the ranks among processes(), which have their rank as the title."""
        is_rank = re.compile(r"rank \d+/\d+ ")
        return {pid: line for pid, line in self.processes(*nodes).items() if is_rank.match(line)}

    def processes(self, *nodes: str) -> dict[int, str]:
        """Return the command lines of the job's processes on `nodes` (default: all nodes) by process id."""
        pids = [pid for node in nodes or self.slurm.nodes for pid in self.slurm.pids(node)]
        run = f"HPCINIT_RUN={self.folder}\0"
        return {pid: _of(pid, "cmdline") for pid in pids if run in _of(pid, "environ")}

    def nodes(self) -> list[str]:
        nodelist = self.slurm.run("squeue", "--noheader", f"--jobs={self.job}", "--format=%N").strip()
        return self.slurm.run("scontrol", "show", "hostnames", nodelist).split()

    def steps(self) -> list[int]:
        """Return the steps that rank 0 printed, in all attempts."""
        log = self.folder / "logs/rank-0.log"
        return [
            int(step) for step in re.findall(r"^step (\d+)$", log.read_text() if log.exists() else "", re.MULTILINE)
        ]

    def checkpoint(self) -> int:
        """Return the step of the newest checkpoint, or 0."""
        return max((int(path.name.removeprefix("step-")) for path in self.saved.glob("step-*")), default=0)

    def why(self) -> str:
        return self.hpcinit("why", self.folder.name, env=self.slurm.env).stdout.partition("\n")[0]

    def wait_for_why(
        self, since: float, reports_fault: Callable[[str], object] = lambda line: not HEALTHY.match(line)
    ) -> tuple[str, float]:
        """Wait until `hpcinit why` reports the fault. Return its first line and the seconds since the fault."""
        while not reports_fault(line := self.why()):
            assert time.monotonic() - since < 150, line
            time.sleep(0.5)
        return line, time.monotonic() - since

    def lost(self) -> int:
        """Return the steps that were repeated, or that the next attempt would repeat."""
        steps = self.steps()
        again = len(steps) - len(set(steps))
        return again or max(steps) - max(self.checkpoint(), 0) if self.state != "COMPLETED" else again

    def finish(self, timeout_s: float = 150) -> str:
        """Wait for the end of the job and return its state. Start requeued jobs at once."""
        deadline = time.monotonic() + timeout_s
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        while (now := self.state) not in over:
            assert time.monotonic() < deadline, now
            if now == "PENDING":
                begin_now(self.slurm, self.job)
            time.sleep(0.5)
        return now

    def ends(self, quick: bool = False) -> str:
        """Wait for the end and describe it. quick: take the remaining steps quickly."""
        if quick:
            Path("quick").touch()
        last = self.finish()
        record = self.folder / "restarts.jsonl"
        count = len(record.read_text().splitlines()) if record.exists() else 0
        return last + (f" after {count} restart{'s' * (count > 1)}" if count else "")


def _of(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def started(
    hpcinit: Run, slurm: MiniSlurm, launch: str, *overrides: str, total: int = 600, saved: Path | None = None
) -> Training:
    """Start a run on 2 nodes that saves after every 5 steps, and wait until it has two checkpoints."""
    Path("train.py").write_text(PROGRAM)
    shape = ["nodes=2", f"launch={launch}", f"ranks_per_node={RANKS_PER_NODE[launch]}"]
    request = [*shape, "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "time_min=20"]
    command = ["train.py", str(total), *([str(saved)] if saved else [])]
    folder = folder_of(submit(hpcinit, slurm, *request, *overrides, "--", *command))
    training = Training(hpcinit, slurm, folder, saved or folder / "checkpoints", launch)
    until(lambda: training.checkpoint() >= 2 * EVERY and training.steps()[-1] % EVERY in (2, 3), 120)
    return training
