"""launch=torchrun as a job: one agent per node, restarts inside the job, signals."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from hpcinit.records import elastic_restarts, timeline
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, log
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

# The ranks are cheap because they do not import torch. First rank 3 raises; after the restart rank 2 crashes.
FAILS = """
import os, signal, time
from pathlib import Path
from hpcinit.world import launchers
world = launchers.read(os.environ)
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(start, world.rank, world.local_rank, world.host, world.job.partition(".")[2], world.warnings, flush=True)
Path(f"up-{start}-{world.rank}").touch()
while len(list(Path().glob(f"up-{start}-*"))) < world.world_size:
    time.sleep(0.1)
if start == "0" and world.rank == 3:
    raise ValueError("boom")
if start == "1" and world.rank == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(300)
"""


def test_restarts_inside_a_job_and_its_end(hpcinit: Run, tmp_path: Path) -> None:
    """After one rank raises, all ranks restart once.

    After a crash the job ends with that signal, and why reports the crash.
    """
    (tmp_path / "fails.py").write_text(FAILS)
    words = ["cluster=local", "nodes=2", "ranks_per_node=2", "launch=torchrun", "launch.max_restarts=1", "wait=true"]
    done = hpcinit("submit", *words, "--", "fails.py", timeout=240)
    folder = folder_of(done)
    # The step's status is the highest of its tasks. The other agent is terminated with 143, if there is enough time.
    assert done.returncode in (128 + signal.SIGSEGV, 128 + signal.SIGTERM), log(folder)
    for rank in range(4):
        node = f"127.0.0.{rank // 2 + 1}"
        again = f"hpcinit: new attempt: elastic restart 1 of at most 1 of job {job_id_of(done)} starts on 127.0.0.[1-2]: rank 3 on 127.0.0.2: Exited with exit code 1 (ValueError: boom)"
        said = (folder / f"logs/rank-{rank}.log").read_text()
        first, second = f"0 {rank} {rank % 2} {node} 0.0 ()", f"1 {rank} {rank % 2} {node} 0e1.0 ()"
        assert re.search(f"(?ms)^{re.escape(first)}$.*^{re.escape(again)}$.*^{re.escape(second)}$", said), said
    (restart,) = elastic_restarts.read(folder)
    assert (restart.rank, restart.host, restart.number) == (3, "127.0.0.2", 1)
    assert [path.name for path in (folder / "errors").glob("**/*.json")] == ["rank-3.json"]
    assert "127.0.0.2: rank 2: Segmentation fault" in log(folder), "printed by the agent about its rank"
    assert "127.0.0.2: task 1: Segmentation fault" in log(folder), "printed by srun about the agent"
    assert "1 restart inside the job" in hpcinit("status", folder.name).stdout
    first, again = timeline.read(folder)
    first_events = ["allocated", "started", "spawned", "interpreter"]  # started: the agent, once
    for attempt, wanted in ((first, first_events), (again, [first_events[0], *first_events[2:]])):
        assert [list(rank.events)[: len(wanted)] for rank in attempt.ranks] == [wanted] * 4
        assert all(sorted(rank.events.values()) == list(rank.events.values()) for rank in attempt.ranks)
    assert {rank.events["allocated"] for rank in again.ranks} == {round(restart.time, 6)}
    assert first.ranks[2].events["started"] == first.ranks[3].events["started"]
    why = hpcinit("why", folder.name).stdout
    assert "\n  1 restart inside the job: rank 3 on 127.0.0.2: Exited with exit code 1 (ValueError: boom)\n" in why
    assert why.startswith("rank 2 on 127.0.0.2 was killed by a signal (Segmentation fault) first"), why


STOPS_ITS_AGENT = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGSTOP)
    sys.exit(3)
time.sleep(600)
"""


def test_a_stopped_agent_is_continued_when_a_rank_ends(hpcinit: Run, tmp_path: Path) -> None:
    """If an agent is stopped with SIGSTOP, the failure of one of its ranks still ends the job."""
    (tmp_path / "stops.py").write_text(STOPS_ITS_AGENT)
    words = ["cluster=local", "nodes=1", "ranks_per_node=2", "launch=torchrun", "wait=true"]
    done = hpcinit("submit", *words, "--", "stops.py", timeout=240)
    assert done.returncode == 3 and "rank 1: Exited with exit code 3" in log(folder_of(done)), done.stderr


def test_an_agent_that_is_killed(hpcinit: Run, tmp_path: Path) -> None:
    """kill -9 of an agent ends the job and all of its ranks."""
    (tmp_path / "waits.py").write_text("import time; print('up', flush=True); time.sleep(300)")
    words = ["cluster=local", "nodes=2", "ranks_per_node=1", "launch=torchrun", "launch.max_restarts=3"]
    folder = folder_of(hpcinit("submit", *words, "--", "waits.py"))
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(2)]
    until(lambda: all(path.exists() and "up" in path.read_text() for path in logs), 120)
    agents = [process for process in psutil.process_iter(["cmdline"]) if is_agent(process, folder)]
    below = {child for process in agents for child in process.children(recursive=True)}
    agents = [process for process in agents if process.children()]  # a signal monitor may have its agent's command line
    assert len(agents) == 2 and len(below) == 4, "a rank and a signal monitor each"
    agents[1].kill()
    until(lambda: '"exit_status"' in (folder / "exit.json").read_text())
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in below))
    assert "Killed" in log(folder) and not list(elastic_restarts.read(folder))


def is_agent(process: psutil.Process, folder: Path) -> bool:
    return process.info["cmdline"] == [sys.executable, "-u", "-m", "hpcinit.elastic", f"{folder}/spec.json"]


# Rank 0 fails at once after SIGTERM. Rank 1 saves for longer than agent.GRACE_S, 3 s.
SAVES = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def handle(number, frame):
    print("SIGTERM", flush=True)
    if rank == 0:
        sys.exit(5)
    time.sleep(5)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, handle)
print("up", flush=True)
time.sleep(300)
"""


def test_a_rank_may_save_when_another_fails_after_sigterm(hpcinit: Run, tmp_path: Path) -> None:
    """The agent sends no second SIGTERM, and does not kill the rank that saves."""
    (tmp_path / "saves.py").write_text(SAVES)
    words = ["cluster=local", "nodes=1", "ranks_per_node=2", "launch=torchrun"]
    folder = folder_of(hpcinit("submit", *words, "--", "saves.py"))
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(2)]
    until(lambda: all(path.exists() and "up" in path.read_text() for path in logs), 120)
    (its_agent,) = (process for process in psutil.process_iter(["cmdline"]) if is_agent(process, folder))
    its_agent.terminate()
    until(lambda: '"exit_status"' in (folder / "exit.json").read_text())
    assert (printed(folder, 0), printed(folder, 1)) == ("up\nSIGTERM\n", "up\nSIGTERM\nsaved\n"), log(folder)
    assert "rank 0: Exited with exit code 5" in log(folder)


# Print each signal, and exit with status 5 after SIGTERM.
LISTENS = """
import os, signal, sys, time
from hpcinit.world import launchers
world = launchers.read(os.environ)
def handle(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, handle)
print(world.rank, world.world_size, world.hosts, world.warnings, os.environ["GROUP_RANK"], flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_ranks_and_signals_under_slurm(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Ranks and hosts on two nodes are those of the step, and each rank gets each signal of Slurm once.

    A signal to one agent reaches its ranks, and ranks that end after SIGTERM are not restarted.
    """
    slurm = idle_slurm
    (tmp_path / "listens.py").write_text(LISTENS)
    words = ["nodes=2", "ranks_per_node=2", "launch=torchrun", "launch.max_restarts=3", "stop.signal=USR1"]
    done = submit(hpcinit, slurm, *words, "--", "listens.py")
    folder, job = folder_of(done), job_id_of(done)
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(4)]
    until(lambda: all(path.exists() and "('n1', 'n2')" in path.read_text() for path in logs), 120)
    slurm.run("scancel", "--signal=USR1", job)
    until(lambda: all("SIGUSR1" in path.read_text() for path in logs))
    (alone,) = (pid for pid in slurm.pids("n2") if b"hpcinit.elastic" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(alone, signal.SIGUSR1)
    until(lambda: all(path.read_text().count("SIGUSR1") == 2 for path in logs[2:]))
    slurm.run("scancel", job)
    assert finish(slurm, job) == "CANCELLED"
    for rank in range(4):
        usr1 = "SIGUSR1\n" * (1 if rank < 2 else 2)
        assert printed(folder, rank) == f"{rank} 4 ('n1', 'n2') () {rank // 2}\n{usr1}SIGTERM\n"
    assert not list(elastic_restarts.read(folder)) and "elastic restart" not in log(folder)
    assert not any(b"hpcinit" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in slurm.pids("n2"))


# Rank 1 ends without a message; the others lose it in the next collective.
ENDS_EARLY = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    os._exit(0)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.more
def test_a_rank_that_is_alone_on_its_node_ends_early(hpcinit: Run, tmp_path: Path) -> None:
    """Its agent reports that it ended with status 0, once ranks of other nodes have failed, and why names it."""
    (tmp_path / "early.py").write_text(ENDS_EARLY)
    words = ["cluster=local", "nodes=3", "ranks_per_node=1", "launch=torchrun", "wait=true"]
    folder = folder_of(hpcinit("submit", *words, "--", "early.py", timeout=600))
    assert "hpcinit: 127.0.0.2: rank 1: Exited with exit code 0" in log(folder), log(folder)
    why = hpcinit("why", folder.name).stdout
    assert why.startswith("rank 1 on 127.0.0.2 ended first, with exit status 0"), why
