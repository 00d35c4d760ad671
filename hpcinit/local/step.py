"""The local engine's srun: starts the tasks, one process each, and ends them together.

    python -m hpcinit.local.step --nodes=2 --ntasks=4 --ntasks-per-node=2 ... command [args]

It takes the options that hpcinit renders for srun and means the same by them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from hpcinit.facts import children, job_log, parent_death, rank_log, signals
from hpcinit.facts.saying import say
from hpcinit.local import environment, processes

KILL_WAIT_S = 2.0


class Step:
    """The tasks of one step. `run()` returns what srun would: the highest exit code of any task."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tasks: dict[int, subprocess.Popen[bytes]] = {}
        self.statuses: dict[int, int] = {}
        self.signals: list[int] = []
        self.parent = os.getppid()  # the batch script

    def run(self) -> int:
        self.signals = signals.collected((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
        try:
            for rank in range(self.options.ntasks):
                self.tasks[rank] = self._start(rank)
            self._wait()
        finally:
            self._end()
        return max(self.statuses.values(), default=0)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        per_node = self.options.ntasks_per_node
        env = {**os.environ, **environment.task(os.environ, self.options.nodes, per_node, rank)}
        output = self.options.output
        path = Path(output.replace("%t", str(rank)).replace("%%", "%")) if output else None
        with rank_log.opened(path) if path else contextlib.nullcontext() as log:
            return subprocess.Popen(
                self.options.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that what a rank starts (data loaders) ends with it
                preexec_fn=partial(parent_death.end_with, os.getpid()),
            )

    def _wait(self) -> None:
        while len(self.statuses) < len(self.tasks):
            if self._is_left_alone():
                return
            while self.signals:
                number = self.signals.pop(0)
                self._signal(number)
                if number in (signal.SIGTERM, signal.SIGINT):
                    return
            for rank, task in self.tasks.items():
                if rank not in self.statuses and (status := children.status(task)) is not None:
                    self._note(rank, status)
                    if status != 0 and self.options.kill_on_bad_exit:
                        return
            time.sleep(0.02)

    def _is_left_alone(self) -> bool:
        """The batch script is gone, however it ended, or the engine, maybe before this process came so far."""
        engine = os.environ.get(processes.ENV_ENGINE, "")
        return os.getppid() != self.parent or (engine.isdigit() and not psutil.pid_exists(int(engine)))

    def _note(self, rank: int, code: int) -> None:
        self.statuses[rank] = code if code >= 0 else 128 - code
        if code != 0:
            node = rank // self.options.ntasks_per_node + 1
            say(f"error: 127.0.0.{node}: task {rank}: {job_log.how(code)}")

    def _signal(self, number: int) -> None:
        for rank, task in self.tasks.items():
            if rank not in self.statuses or number == signal.SIGKILL:
                children.signal_group(task, number)

    def _end(self) -> None:
        """Nothing of this step is left: SIGTERM to what runs, then SIGKILL to every group."""
        if len(self.statuses) < len(self.tasks):
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + KILL_WAIT_S
            while time.monotonic() < deadline and any(children.status(t) is None for t in self.tasks.values()):
                time.sleep(0.02)
        self._signal(signal.SIGKILL)
        for rank, task in self.tasks.items():
            task.wait()
            if rank not in self.statuses:
                self.statuses[rank] = task.returncode if task.returncode >= 0 else 128 - task.returncode


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcinit.local.step", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("SLURM_NNODES", "1")))
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--output", help="log file of a task; %%t: its rank; none: as this process")
    # Taken and not acted on: this machine's cores are not shared out, and output is appended in any case.
    # There is no MPI, and the tasks have this process's environment.
    for name in ("--cpus-per-task", "--wait", "--cpu-bind", "--gpu-bind", "--open-mode", "--export", "--mpi"):
        parser.add_argument(name)
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    try:
        return Step(parse(argv)).run()
    except OSError as error:  # a log that cannot be opened, no more processes
        say(f"error: cannot start a task: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
