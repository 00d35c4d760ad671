"""What runs and foreign jobs share: a cluster with accounting, and a watch on the ends of processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.ledger_truth import plans, truth
from tests.minislurm import MiniSlurm

OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY"}
PROGRAMS = Path(__file__).parent / "programs"


@contextmanager
def cluster() -> Iterator[MiniSlurm]:
    """Start 4 nodes with accounting. Jobs of the partition high preempt those of low and grace, for their GPUs."""
    partitions = {
        plans.SAFE: "PriorityTier=20 PreemptMode=OFF MaxTime=1:00:00",
        plans.PREEMPTED: "PriorityTier=1 PreemptMode=REQUEUE MaxTime=1:00:00",
        plans.WITH_GRACE: "PriorityTier=1 PreemptMode=CANCEL GraceTime=20 MaxTime=1:00:00",
    }
    name = f"ledger-{os.getpid()}"
    options = {"FirstJobId": "61001"}  # as on a cluster that is older than a minute
    with MiniSlurm(
        4, 8, accounting=True, name=name, cpus=32, options=options, partitions=partitions
    ) as slurm:  # fmt: skip
        yield slurm


class Deaths:
    """Watches the processes that have a file of record.py, and notes when each of them ends."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()
        self._seen: set[Path] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def add(self, folder: Path) -> None:
        with self._lock:
            self._folders.add(folder)

    def remove(self, folder: Path) -> None:
        with self._lock:
            self._folders.discard(folder)

    def _watch(self) -> None:
        poll, files = select.poll(), dict[int, Path]()
        while True:
            with self._lock:
                found = [path for folder in self._folders for path in folder.glob("rank-*.jsonl")]
            for path in found:
                if path in self._seen:
                    continue
                self._seen.add(path)
                try:
                    descriptor = os.pidfd_open(int(path.name.split("-")[2]))
                except ProcessLookupError:
                    continue
                files[descriptor] = path
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(200):
                path = files.pop(descriptor)
                with (path.parent / "deaths.jsonl").open("a") as file:
                    file.write(json.dumps({"file": path.name, "at": time.time()}) + "\n")
                poll.unregister(descriptor)
                os.close(descriptor)
            if not files:
                time.sleep(0.2)


def states(slurm: MiniSlurm, jobs: list[str]) -> dict[str, tuple[str, str]]:
    """Return state and reason of each job that the controller knows."""
    lines = slurm.run("squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%A|%T|%r")
    rows = (line.split("|") for line in lines.splitlines())
    return {job: (state, reason) for job, state, reason in rows}


def sacct(slurm: MiniSlurm, jobs: list[str]) -> str:
    """Return the records of the jobs, after the database has the end of each."""
    command = [
        "sacct", "-X", "-D", "--parsable2", "--noheader", f"--jobs={','.join(jobs)}",
        f"--format={','.join(truth.SACCT)}",
    ]  # fmt: skip
    text = ""
    for _ in range(20):
        text = slurm.run(*command)
        if text and not any(word in text for word in ("Unknown", "RUNNING", "PENDING")):
            break
        time.sleep(1)
    return text


def report(slurm: MiniSlurm, case: Path, words: list[str], folder: Path) -> None:
    """Write report.json and report.txt of `hpcinit report`."""
    for options, name in ((["--json"], "report.json"), ([], "report.txt")):
        done = subprocess.run(
            [sys.executable, "-m", "hpcinit", "report", *words, *options], cwd=folder, env=os.environ | slurm.env,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        (case / name).write_text(done.stdout or json.dumps({"error": done.stderr}))
        if done.stderr:
            (case / f"{name}.stderr").write_text(done.stderr)


class Rush:
    """Starts requeued jobs soon: Slurm would wait two minutes."""

    def __init__(self, slurm: MiniSlurm) -> None:
        self.slurm, self.since = slurm, dict[str, float]()

    def look(self, job: str, state: str, reason: str) -> None:
        if state != "PENDING" or reason != "BeginTime":
            self.since.pop(job, None)
        elif time.monotonic() > self.since.setdefault(job, time.monotonic()) + 3:
            self.slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            self.since.pop(job, None)
