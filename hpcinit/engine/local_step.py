"""The local engine's replacement for srun: starts one process per task, and stops all of them together.

    python -m hpcinit.engine.local_step --nodes=2 --ntasks=4 --ntasks-per-node=2 ... command [args]

It accepts srun's options, and ignores those that it does not need. It simulates nodes with loopback addresses, and sets
the variables that Slurm sets. A test compares these variables with those of a real Slurm, recorded in tests/data/slurm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from hpcinit.base import processes, signals
from hpcinit.base.console import say
from hpcinit.base.supervisor import LOOK_S, Child, Supervisor
from hpcinit.records import job_log, rank_log, run_folder

KILL_WAIT_S = 2.0


def nodelist(nodes: int) -> str:
    """Return the addresses of the virtual nodes as a nodelist, such as '127.0.0.[1-4]'.

    They need no name resolution.
    """
    return "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"


def counts(per_node: int, nodes: int) -> str:
    """Return the value of SLURM_TASKS_PER_NODE: '2(x4)' for 2 tasks on each of 4 nodes, '2' for one node."""
    return str(per_node) if nodes == 1 else f"{per_node}(x{nodes})"


def batch_variables(job_id: int, name: str, nodes: int, per_node: int, workdir: str) -> dict[str, str]:
    """Return the environment variables that Slurm would set for the batch script."""
    hosts, tasks = nodelist(nodes), counts(per_node, nodes)
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_NAME": name,
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NPROCS": str(nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_SUBMIT_DIR": workdir,
        "SLURM_SUBMIT_HOST": "127.0.0.1",
        "SLURMD_NODENAME": "127.0.0.1",
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
    }


def task_variables(job: Mapping[str, str], nodes: int, per_node: int, rank: int, step: int = 0) -> dict[str, str]:
    """Return the environment variables that Slurm would set for one task, besides the job's.

    Ranks are placed in blocks: the first node has the first ranks.

    job: the environment of the job.
    nodes, per_node: the number of nodes, and of tasks on each.
    """
    node = rank // per_node
    hosts, tasks = nodelist(nodes), counts(per_node, nodes)
    gtids = range(node * per_node, (node + 1) * per_node)
    return {
        # A step that was started manually has no job: its process id is the job id.
        "SLURM_JOB_ID": job.get("SLURM_JOB_ID", str(os.getpid())),
        "SLURM_JOB_NODELIST": job.get("SLURM_JOB_NODELIST", hosts),
        "SLURM_STEP_ID": str(step),
        "SLURM_STEPID": str(step),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NPROCS": str(nodes * per_node),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_DISTRIBUTION": "block",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank - node * per_node),
        "SLURM_GTIDS": ",".join(map(str, gtids)),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_SRUN_COMM_HOST": "127.0.0.1",
        "SLURMD_NODENAME": f"127.0.0.{node + 1}",
        "SLURM_SUBMIT_DIR": job.get("SLURM_SUBMIT_DIR", ""),
    }


class Step(Supervisor):
    """The tasks of one step.

    If a task fails, run() stops the other tasks and returns the exit code of the failed one (the highest, if several
    have failed). srun also counts the stopped tasks, and returns 143 (128 + SIGTERM).
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.parent = os.getppid()  # the batch script
        self.failed: dict[int, int] = {}  # the exit codes of the tasks that had ended at the first failure

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
        env = {**os.environ, **task_variables(os.environ, self.options.nodes, per_node, rank)}
        output = self.options.output
        path = Path(output.replace("%t", str(rank)).replace("%%", "%")) if output else None
        die_with_this = partial(processes.die_with_parent, os.getpid(), signal.SIGTERM)
        with rank_log.opened(path) if path else contextlib.nullcontext() as log:
            self.start(rank, self.options.command, env, output=log, in_child=die_with_this)

    def _next_signal(self, timeout_s: float) -> int | None:
        """Return the next signal that has arrived, or None after a short wait."""
        if not self.signals:
            time.sleep(min(LOOK_S, timeout_s))
        return self.signals.pop(0) if self.signals else None

    def _is_orphaned(self) -> bool:
        """Return whether the batch script or the job's background process has ended."""
        engine = os.environ.get(run_folder.ENV_ENGINE, "")
        return os.getppid() != self.parent or (engine.isdigit() and not psutil.pid_exists(int(engine)))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpcinit.engine.local_step", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=int(os.environ.get("SLURM_NNODES", "1")))
    parser.add_argument("--ntasks", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--output", help="log file of a task; %%t: its rank; default: stdout of this process")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    # Other options of srun have no effect here: cores are not reserved, output is always appended, there is no MPI, and
    # the tasks get the environment of this process.
    return parser.parse_known_args(argv)[0]


def main(argv: Sequence[str]) -> int:
    try:
        return Step(parse(argv)).run()
    except OSError as error:  # for example a log that cannot be opened, or the process limit
        say(f"error: cannot start a task: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
