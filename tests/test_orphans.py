"""However a job ends, no process of it stays on any node, and no port is left behind."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests import waiting
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_id_of, submit

# Ranks that have met, with a child each that is no rank, and one that ignores what it is told.
until = partial(waiting.until, timeout_s=120)

TRAINING = """
import os, signal, subprocess, sys, time
import hpcinit
run = hpcinit.init()
if run.rank == 3:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
print("up", flush=True)
time.sleep(1000)
"""


def lines(slurm: MiniSlurm, node: str, folder: Path) -> dict[int, str]:
    """Command lines of the node's processes that are of the run, or the children of its ranks."""
    found = {}
    for pid in slurm.pids(node):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"HPCINIT_RUN={folder}" in environment:
            found[pid] = line
    return found


def listening(slurm: MiniSlurm, node: str) -> set[int]:
    """Ports on which somebody listens in the node's network."""
    holder = min(slurm.pids(node))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{holder}/net/{name}").read_text().splitlines()[1:]
    ]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}  # 0A: LISTEN


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slurm
@pytest.mark.parametrize("end", ["scancel", "kill -9 of the batch script", "kill -9 of a rank"])
def test_nothing_stays(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, end: str) -> None:
    """Ranks, their children and the port of rank 0 are gone from both nodes, also of a rank that ignores SIGTERM."""
    slurm, nodes = idle_slurm, ("n1", "n2")
    (tmp_path / "code.py").write_text(TRAINING)
    before = {node: listening(slurm, node) for node in nodes}
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "--", "code.py")
    folder, job = folder_of(done), job_id_of(done)
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(4)]
    until(lambda: all(log.exists() and "up" in log.read_text().splitlines() for log in logs))
    assert all(listening(slurm, node) - before[node] for node in nodes)  # torch's store, gloo, the job's own steps
    there = {pid: line for node in nodes for pid, line in lines(slurm, node, folder).items()}
    assert (
        sum("hpcinit.run" in line for line in there.values()) >= 4
        and sum("sleep 1000" in s for s in there.values()) == 4
    )
    if end == "scancel":
        slurm.run("scancel", job)
    elif end == "kill -9 of a rank":
        victim = next(pid for pid in lines(slurm, "n2", folder) if "hpcinit.run" in there[pid])
        (child,) = (pid for pid, line in there.items() if "sleep" in line and parent(pid) == victim)
        os.kill(victim, signal.SIGKILL)
        # Slurm finds it in the step's cgroup; the proctrack/linuxproc of this cluster goes by parents, and it has none.
        os.kill(child, signal.SIGKILL)
    else:
        scripts = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in slurm.pids("n1")}
        (script,) = (pid for pid, line in scripts.items() if b"slurm_script" in line)
        os.kill(script, signal.SIGKILL)
    until(lambda: not any(lines(slurm, node, folder) for node in nodes))
    until(lambda: not any(listening(slurm, node) - before[node] for node in nodes))
    until(lambda: slurm.run("squeue", "--noheader", f"--jobs={job}").strip() == "")
