"""After any end of a job, none of its processes and open ports is left on a node."""

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

until = partial(waiting.until, timeout_s=120)

# Each rank has a child process, and one rank ignores SIGTERM.
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
    """Return the command lines of the node's processes that belong to the run."""
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
    """Return the listening ports of the node."""
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
@pytest.mark.parametrize(
    "end",
    [
        "kill -9 of a rank",
        *(pytest.param(end, marks=pytest.mark.more) for end in ("scancel", "kill -9 of the batch script")),
    ],
)
def test_no_process_and_port_is_left(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, end: str) -> None:
    """All ranks, their children and rank 0's port are gone from both nodes, even if a rank ignores SIGTERM."""
    slurm, nodes = idle_slurm, ("n1", "n2")
    (tmp_path / "code.py").write_text(TRAINING)
    before = {node: listening(slurm, node) for node in nodes}
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "--", "code.py")
    folder, job = folder_of(done), job_id_of(done)
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(4)]
    until(lambda: all(log.exists() and "up" in log.read_text().splitlines() for log in logs))
    assert all(listening(slurm, node) - before[node] for node in nodes)  # torch's store, gloo, the job's own steps
    running = {pid: line for node in nodes for pid, line in lines(slurm, node, folder).items()}
    assert (
        sum(line.startswith("rank ") for line in running.values()) == 4
        and sum("sleep 1000" in s for s in running.values()) == 4
    )
    if end == "scancel":
        slurm.run("scancel", job)
    elif end == "kill -9 of a rank":
        victim = next(pid for pid in lines(slurm, "n2", folder) if running[pid].startswith("rank "))
        (child,) = (pid for pid, line in running.items() if "sleep" in line and parent(pid) == victim)
        os.kill(victim, signal.SIGKILL)
        # With cgroups, Slurm finds an orphan; proctrack/linuxproc of this cluster does not, because it has no parent.
        os.kill(child, signal.SIGKILL)
    else:
        scripts = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in slurm.pids("n1")}
        (script,) = (pid for pid, line in scripts.items() if b"slurm_script" in line)
        os.kill(script, signal.SIGKILL)
    until(lambda: not any(lines(slurm, node, folder) for node in nodes))
    until(lambda: not any(listening(slurm, node) - before[node] for node in nodes))
    until(lambda: slurm.run("squeue", "--noheader", f"--jobs={job}").strip() == "")
