"""Start real ranks for a check: plain processes like those of srun, hpcinit's fork server, or torchrun.

Every rank runs `python -m tests.gpu.rank MODULE:FUNCTION`, which calls the function and writes its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcinit.engine import local_step
from hpcinit.records import run_folder
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Comm, Launch, Precision, Program, Samples, Spec, Training
from tests.gpu.checks import CPU_FACTOR

ROOT = Path(__file__).parents[2]
PLAIN, FORK, TORCHRUN = "plain processes", "launch=fork", "torchrun"
STOPPED = 124  # status of ranks that reached their time limit, as of timeout(1)
LEFT_S = 20.0  # for the other ranks, after one has failed


@dataclass(frozen=True)
class Job:
    """One start of some ranks. module: MODULE:FUNCTION of the rank. args: given to the function as keywords."""

    function: str
    ranks: int = 1
    launch: str = PLAIN
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 120.0
    layout: Layout | None = None
    training: Training = field(default_factory=Training)
    comm: Comm = field(default_factory=Comm)
    batch: Samples = field(default_factory=Samples)
    preload: Sequence[str] = ("torch",)


@dataclass(frozen=True)
class Started:
    """The outcome of a Job. status: 0 if every rank succeeded. start_s: time.time() before the first process."""

    status: int
    results: Sequence[Any]
    output: str
    start_s: float
    folder: Path
    limit_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 0 and all(result is not None for result in self.results)

    @property
    def first(self) -> Any:
        """The result of rank 0. Raises RuntimeError with the end of the output if there is none."""
        if self.results[0] is None:
            raise RuntimeError(f"rank 0 wrote no result, exit status {self.status}: {self.tail()}")
        return self.results[0]

    def tail(self, characters: int = 800) -> str:
        """Return the end of the output, and whether the time limit was reached."""
        stopped = f"stopped after {self.limit_s:.0f} s: " if self.status == STOPPED else ""
        return stopped + self.output.strip()[-characters:]


def run(job: Job, folder: Path, meanwhile: Callable[[int], None] = lambda pid: None) -> Started:
    """Start the ranks, wait for them and read their results. folder: the run folder, created here.

    meanwhile: called once with the pid of the process that starts the ranks (of rank 0 with plain processes).
    """
    folder.mkdir(parents=True)
    for below in (run_folder.LOGS, run_folder.ERRORS, "results"):
        (folder / below).mkdir()
    layout = (job.layout or Layout(dp_replicate=job.ranks)).over(job.ranks, job.ranks)
    argument = json.dumps({"function": job.function, "args": dict(job.args), "folder": str(folder)})
    spec = Spec(
        name=folder.name, cluster="local", nodes=1, ranks_per_node=job.ranks, workdir=str(ROOT),
        program=Program("module", "tests.gpu.rank", (argument,)), nonce=os.urandom(16).hex(),
        layout=layout, training=job.training, comm=job.comm, batch=job.batch,
        launch=Launch("fork" if job.launch == FORK else "srun", tuple(job.preload) if job.launch == FORK else ()),
    )  # fmt: skip
    (folder / run_folder.SPEC).write_text(spec.to_json())
    limit_s = job.limit_s * (CPU_FACTOR if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 1)
    start_s = time.time()
    with (folder / "output.log").open("ab", buffering=0) as log:
        processes = [
            subprocess.Popen(
                command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            for command, env in _commands(job, folder, argument)
        ]
        try:
            meanwhile(processes[0].pid)
            status = _wait(processes, start_s + limit_s)
        finally:
            for process in processes:
                _kill(process)
    results = [_result(folder / f"results/rank-{rank}.json") for rank in range(job.ranks)]
    logs = [folder / "output.log", *sorted((folder / run_folder.LOGS).glob("rank-*.log"))]
    output = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
    return Started(status, results, output, start_s, folder, limit_s)


def _commands(job: Job, folder: Path, argument: str) -> list[tuple[list[str], dict[str, str]]]:
    base = {
        **os.environ,
        **job.env,
        "HPCINIT_VERBOSE": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    python, spec = [sys.executable, "-u"], str(folder / run_folder.SPEC)
    if job.launch == TORCHRUN:
        rendezvous = ["--nnodes", "1", "--nproc-per-node", str(job.ranks), "--master-port", str(free_port())]
        agent = [*python, "-m", "torch.distributed.run", *rendezvous, "-m", "tests.gpu.rank", argument]
        return [(agent, base)]
    per_node = 1 if job.launch == FORK else job.ranks
    number = f"{os.getpid()}{time.monotonic_ns() % 10000:04d}"
    batch = local_step.batch_variables(int(number), folder.name, 1, per_node, str(folder))
    module = "hpcinit.fork" if job.launch == FORK else "hpcinit.run"
    return [
        ([*python, "-m", module, spec], {**base, **batch, **local_step.task_variables(batch, 1, per_node, rank)})
        for rank in range(per_node)
    ]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> int:
    """Return the first exit status other than 0, or STOPPED after the deadline. After a failure the others have LEFT_S."""
    first = 0
    while any(process.poll() is None for process in processes):
        if time.time() > deadline:
            return first or STOPPED
        failed = next((process.returncode for process in processes if process.returncode), 0)
        if failed and not first:
            first, deadline = failed, min(deadline, time.time() + LEFT_S)
        time.sleep(0.02)
    return first or next((process.returncode for process in processes if process.returncode), 0)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its session. Forked ranks have separate sessions and die with their parent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def training(wrap: str = "ddp", param: str = "fp32", **more: Any) -> Training:
    """Return training settings with parameters in this precision; bf16 gradients are reduced in fp32."""
    return Training(wrap=wrap, precision=Precision(param, "fp32"), **more)
