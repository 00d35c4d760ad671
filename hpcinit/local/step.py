"""The local engine's srun: starts the tasks, one process each, and ends them together.

    python -m hpcinit.local.step --nodes=2 --ntasks=4 --ntasks-per-node=2 ... command [args]

It takes the options that hpcinit renders for srun and means the same by them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from hpcinit.base import process_limits, signals
from hpcinit.base.console import say
from hpcinit.base.supervisor import LOOK_S, Child, Supervisor
from hpcinit.local import environment_variables, processes
from hpcinit.records import job_log, rank_log

KILL_WAIT_S = 2.0


class Step(Supervisor):
    """The tasks of one step. `run()` returns what srun would: the highest exit code of any task."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.parent = os.getppid()  # the batch script

    def run(self) -> int:
        self.signals = signals.collected((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
        try:
            for rank in range(self.options.ntasks):
                self._start(rank)
            self.supervise(self._next_signal)
        finally:
            self.stop(KILL_WAIT_S)
        return max((code if code >= 0 else 128 - code for code in self.ended().values()), default=0)

    def on_exit(self, child: Child) -> bool:
        code = child.ended() or 0
        if code != 0:
            node = child.number // self.options.ntasks_per_node + 1
            say(f"error: 127.0.0.{node}: task {child.number}: {job_log.how(code)}")
        return code != 0 and bool(self.options.kill_on_bad_exit)

    def on_signal(self, number: int) -> bool:
        self.signal(number)
        return number in (signal.SIGTERM, signal.SIGINT)

    def is_over(self) -> bool:
        return self._is_left_alone()

    def _start(self, rank: int) -> None:
        per_node = self.options.ntasks_per_node
        env = {**os.environ, **environment_variables.task(os.environ, self.options.nodes, per_node, rank)}
        output = self.options.output
        path = Path(output.replace("%t", str(rank)).replace("%%", "%")) if output else None
        end_with_this = partial(process_limits.end_with_parent_process, os.getpid())
        with rank_log.opened(path) if path else contextlib.nullcontext() as log:
            self.start(rank, self.options.command, env, output=log, in_child=end_with_this)

    def _next_signal(self, timeout_s: float) -> int | None:
        if not self.signals:
            time.sleep(min(LOOK_S, timeout_s))
        return self.signals.pop(0) if self.signals else None

    def _is_left_alone(self) -> bool:
        """The batch script is gone, however it ended, or the engine, maybe before this process came so far."""
        engine = os.environ.get(processes.ENV_ENGINE, "")
        return os.getppid() != self.parent or (engine.isdigit() and not psutil.pid_exists(int(engine)))


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
