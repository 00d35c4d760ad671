"""The srun of the local engine: start one process per task, and stop them together.

    python -m hpcinit.local.step --nodes=2 --ntasks=4 --ntasks-per-node=2 ... command [args]

It accepts the options that hpcinit renders for srun, with the same meaning.
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

from hpcinit.base import processes, signals
from hpcinit.base.console import say
from hpcinit.base.supervisor import LOOK_S, Child, Supervisor
from hpcinit.local import environment_variables
from hpcinit.records import job_log, rank_log, run_folder

KILL_WAIT_S = 2.0


class Step(Supervisor):
    """The tasks of one step. `run()` returns the highest exit code of any task.

    Tasks that it terminates because another one failed do not count. srun counts them, and returns 143 (128 + SIGTERM)
    then: in a job on Slurm the batch script looks for the rank that failed.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.parent = os.getppid()  # the batch script
        self.failed: dict[int, int] = {}  # exit codes by task, once one has failed

    def run(self) -> int:
        self.signals = signals.collected((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
        try:
            for rank in range(self.options.ntasks):
                self._start(rank)
            self.supervise(self._next_signal)
        finally:
            self.stop(KILL_WAIT_S)
        ended = self.failed or self.ended()
        return max((code if code >= 0 else 128 - code for code in ended.values()), default=0)

    def on_exit(self, child: Child) -> bool:
        code = child.ended() or 0
        if code != 0:
            node = child.number // self.options.ntasks_per_node + 1
            say(f"error: 127.0.0.{node}: task {child.number}: {job_log.how(code)}")
        if code == 0 or not self.options.kill_on_bad_exit:
            return False
        self.failed = self.ended()
        return True

    def on_signal(self, number: int) -> bool:
        self.signal(number)
        return number in (signal.SIGTERM, signal.SIGINT)

    def is_over(self) -> bool:
        return self._is_orphaned()

    def _start(self, rank: int) -> None:
        per_node = self.options.ntasks_per_node
        env = {**os.environ, **environment_variables.task(os.environ, self.options.nodes, per_node, rank)}
        output = self.options.output
        path = Path(output.replace("%t", str(rank)).replace("%%", "%")) if output else None
        die_with_this = partial(processes.terminate_with_parent, os.getpid())
        with rank_log.opened(path) if path else contextlib.nullcontext() as log:
            self.start(rank, self.options.command, env, output=log, in_child=die_with_this)

    def _next_signal(self, timeout_s: float) -> int | None:
        """Return the next signal that has arrived, None after a short wait."""
        if not self.signals:
            time.sleep(min(LOOK_S, timeout_s))
        return self.signals.pop(0) if self.signals else None

    def _is_orphaned(self) -> bool:
        """Whether the batch script or the engine has ended, possibly before this process started."""
        engine = os.environ.get(run_folder.ENV_ENGINE, "")
        return os.getppid() != self.parent or (engine.isdigit() and not psutil.pid_exists(int(engine)))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcinit.local.step", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("SLURM_NNODES", "1")))
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--output", help="log file of a task; %%t: its rank; default: stdout of this process")
    # These options are accepted but have no effect: cores are not reserved, output is always appended, there is no MPI,
    # and the tasks get the environment of this process.
    for name in ("--cpus-per-task", "--wait", "--cpu-bind", "--gpu-bind", "--open-mode", "--export", "--mpi"):
        parser.add_argument(name)
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    try:
        return Step(parse(argv)).run()
    except OSError as error:  # for example a log that cannot be opened, or the process limit
        say(f"error: cannot start a task: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
