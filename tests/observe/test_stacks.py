"""`hpcinit stacks`: where every rank is now, for each way of starting ranks, and how ranks are put into groups."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcinit.observe import stack_collector, stacks
from hpcinit.observe.stacks import RankStack
from hpcinit.runtime.lifecycle import stack_signal
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.processes import members
from tests.submitting import folder_of, submit
from tests.waiting import until

# Each rank of an unchanged script is in another state. A C function that a signal interrupts ends at once.
FAULTS = """
import ctypes, os, signal, threading, time
rank = int(os.environ["RANK"])
def wait():
    threading.Event().wait()
def read_disk():
    while True:
        time.sleep(600)
def keep_gil():
    ctypes.PyDLL(None).sleep(6000)
    print("interrupted", flush=True)
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
def step(n):
    return sum(x * x for x in range(n))
def train():
    while True:
        step(1000)
        time.sleep(0.003)
        step(2000)
        time.sleep(0.005)
{1: read_disk, 3: keep_gil, 4: train, 5: stop}.get(rank, wait)()
"""
SHAPE = ["nodes=4", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]
EXPECTED = {
    (5,): "stopped",
    (3,): "holds the GIL",
    (1,): "same",
    (4,): "moving",
    (0, 2, 6, 7): "same",
}


def report(hpcinit: Run, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    """Return the answer, without groups while the job waits for its nodes."""
    done = hpcinit("stacks", folder.name, "--json", env=env)
    assert done.returncode == 0 or " has not started: job " in done.stderr, done.stderr
    found = json_documents.parse(done.stdout, "stacks", "error")[0]
    return {"groups": [], **found}


def states(found: dict[str, Any]) -> dict[tuple[int, ...], str]:
    return {tuple(group["ranks"]): group["state"] for group in found["groups"]}


def check(hpcinit: Run, folder: Path, env: dict[str, str], by_node: bool = True) -> None:
    """Wait until each rank is at its fault. Then the text has the odd ranks first, and the run continues."""
    seen: list[dict[str, Any]] = []

    def all_there() -> bool:
        seen.append(report(hpcinit, folder, env))
        return states(seen[-1]) == EXPECTED

    try:
        until(all_there, timeout_s=300, pause_s=1)
    except AssertionError:
        raise AssertionError(json.dumps(seen[-1], indent=1)) from None
    found = seen[-1]
    assert (found["missing"], found["silent_nodes"]) == ([], [])
    by_rank = {rank: group for group in found["groups"] for rank in group["ranks"]}
    assert by_rank[1]["at"].endswith("in read_disk") and by_rank[3]["at"].endswith("in keep_gil"), found
    assert [by_rank[rank]["hosts"] for rank in (1, 5)] == ([["n1"], ["n3"]] if by_node else [[os.uname().nodename]] * 2)
    text = hpcinit("stacks", folder.name, env=env).stdout
    first, second = [line for line in text.splitlines() if not line.startswith(" ")][:2]
    [pid] = by_rank[5]["pids"]
    host = by_rank[5]["hosts"][0]
    assert first == f"rank 5 on {host}: stopped (SIGSTOP, or a debugger); to continue: kill -CONT {pid}", text
    assert ": holds the GIL in 3 of 3 samples, at faults.py:" in second, text
    assert "\nranks 0,2,6-7 on " in text and " in wait, the same line in 3 of 3 samples, used 0." in text, text
    assert "RUNNING" in hpcinit("status", folder.name, env=env).stdout
    assert "interrupted" not in "".join(log.read_text() for log in (folder / "logs").glob("rank-*.log"))


@pytest.mark.slurm
@pytest.mark.parametrize(
    "launch", ["srun", *(pytest.param(launch, marks=pytest.mark.more) for launch in ("fork", "torchrun"))]
)
def test_ranks_that_hpcinit_starts(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, launch: str) -> None:
    """Each state is found for a script that never imports hpcinit, and each stack except the stopped rank's."""
    (tmp_path / "faults.py").write_text(FAULTS)
    folder = folder_of(submit(hpcinit, idle_slurm, *SHAPE, f"launch={launch}", "--", "faults.py"))
    check(hpcinit, folder, idle_slurm.env)
    found = report(hpcinit, folder, idle_slurm.env)
    assert [group["frames"] for group in found["groups"] if group["state"] == "stopped"] == [[]]


@pytest.mark.slurm
def test_the_ranks_of_a_shell_script(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """For the Python that a shell script starts, the output has the state, and the command that shows the stack."""
    (tmp_path / "faults.py").write_text(FAULTS)
    (tmp_path / "wrap.sh").write_text(f"#!/bin/bash\ncd /\n'{sys.executable}' {tmp_path}/faults.py\n")
    (tmp_path / "wrap.sh").chmod(0o755)
    folder = folder_of(submit(hpcinit, idle_slurm, *SHAPE, "--", "./wrap.sh"))
    until(lambda: (5,) in states(report(hpcinit, folder, idle_slurm.env)), timeout_s=300, pause_s=1)
    text = hpcinit("stacks", folder.name, env=idle_slurm.env).stdout
    assert text.startswith("rank 5 on n3: stopped (SIGSTOP, or a debugger); to continue: kill -CONT "), text
    show = "; to see it: hpcinit exec RUN --rank 0 -- sh -c 'py-spy dump --pid $HPCINIT_RANK_PID'"
    assert "ranks 0" in text and "no Python stack" in text and show in text, text


def test_without_slurm(hpcinit: Run, tmp_path: Path) -> None:
    """With cluster=local the ranks of this machine are found, and the message names its end afterwards."""
    (tmp_path / "faults.py").write_text(FAULTS)
    folder = folder_of(hpcinit("submit", "cluster=local", "nodes=4", "ranks_per_node=2", "--", "faults.py"))
    try:
        check(hpcinit, folder, {}, by_node=False)
    finally:
        hpcinit("cancel", folder.name)
    until(lambda: hpcinit("stacks", folder.name).returncode == 2)
    assert hpcinit("stacks", folder.name).stderr == (
        f"hpcinit: error: {folder.name} has ended (CANCELLED), so it has no ranks any more. "
        f"To see what happened: hpcinit why {folder.name}\n"
    )


@pytest.mark.more
@pytest.mark.slurm
def test_a_node_that_does_not_answer(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The other nodes are shown, and the silent one is named first. A run that waits gets another message."""
    (tmp_path / "faults.py").write_text(FAULTS)
    later = folder_of(submit(hpcinit, idle_slurm, *SHAPE, "+cluster.sbatch.begin=now+1hour", "--", "faults.py"))
    done = hpcinit("stacks", later.name, env=idle_slurm.env)
    assert done.returncode == 2
    assert f"{later.name} has not started: job " in done.stderr and " is PENDING" in done.stderr, done.stderr
    folder = folder_of(submit(hpcinit, idle_slurm, *SHAPE, "--", "faults.py"))
    until(lambda: states(report(hpcinit, folder, idle_slurm.env)).keys() == EXPECTED.keys(), pause_s=1)
    daemon = int((idle_slurm.directory / "run/n2.pid").read_text())
    assert daemon in members(idle_slurm.name)
    os.kill(daemon, signal.SIGSTOP)
    try:
        text = hpcinit("stacks", folder.name, env=idle_slurm.env).stdout
    finally:
        os.kill(daemon, signal.SIGCONT)
    assert text.startswith("no answer from n2: is it down? The other nodes answered\nno process of ranks 2-3 on"), text
    assert "rank 1 on n1: at faults.py:" in text, text
    idle_slurm.cancel_all()
    idle_slurm.wait_idle()


# One process, without a run

RANK = """
import os, sys
from hpcinit.runtime.lifecycle import stack_signal
stack_signal.install(7)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_only_the_rank_itself_gets_the_signal() -> None:
    """A forked child (a DataLoader worker) is no rank and has no label; the rank writes its own stack."""
    with subprocess.Popen(
        [sys.executable, "-c", RANK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HPCINIT_RUN": "/run/of/a/test"},
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        asked = {"run": "/run/of/a/test", "slurm": False, "tasks": False}
        [found] = stack_collector.ranks(asked)
        assert (found.pid, found.rank) == (process.pid, 7)
        assert stack_collector._label(Path(f"/proc/{child}")) is None
        assert found.label.signal in range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
        sampled = stack_collector._sampled(found, 2, 0.0)
        assert sampled["gil_kept"] is False
        assert [frame[2] for frame in sampled["samples"][-1]["frames"]] == ["<module>"], sampled
        process.communicate("")
        assert process.returncode == 0


THREADS = """
import threading
from hpcinit.runtime.lifecycle import stack_signal
stack_signal.install(7)
def deep(n):
    return deep(n - 1) + 1 if n else 0
def work():
    while True:
        deep(30)
        exec(compile("[b for b in range(9)]", "x", "exec"), {})
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
work()
"""


@pytest.mark.parametrize("samples", [50, pytest.param(2000, marks=pytest.mark.more)])
def test_threads_that_run_python_get_no_signal(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    """The handler of the signal reads stacks that change meanwhile: it ended such a process after 83 to 4,461 signals."""

    def signaled(one: stack_collector.Process) -> bool:
        raise AssertionError(f"process {one.pid} got the signal")

    monkeypatch.setattr(stack_collector, "_signal_thread", signaled)
    monkeypatch.setattr(stack_collector, "GIL_S", 60.0)
    with subprocess.Popen(
        [sys.executable, "-c", THREADS], stdout=subprocess.PIPE, env={**os.environ, "HPCINIT_RUN": "/run/of/a/test"}
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        [found] = stack_collector.ranks({"run": "/run/of/a/test", "slurm": False, "tasks": False})
        sampled = stack_collector._sampled(found, samples, 0.0)
        assert process.poll() is None
        process.kill()
    frames = [one["frames"] for one in sampled["samples"]]
    assert len(frames) == samples and all(each[-1][2] == "<module>" for each in frames), frames
    assert sampled["gil_kept"] is False


# What hpcinit stacks makes of samples


def sampled(rank: int, *samples: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the samples of one rank, as a collector prints them."""
    whole = [
        {"state": "S", "wchan": "futex_wait", "frames": [["/home/train.py", 91, "train"]], **one} for one in samples
    ]
    own = {"rank": rank, "pid": 100 + rank, "title": "", "python": True, "cpu_s": 0.0}
    return {**own, "gil_kept": None, "samples": whole, **more}


def group_of(document: dict[str, Any]) -> stacks.Group:
    [group] = stacks.fold([stacks.rank_stack(document, "n1")])
    return group


def test_a_rank_in_the_kernel() -> None:
    """A fake: three samples of a process in state D, which needs a broken disk or file server."""
    group = group_of(sampled(3, *[{"state": "D", "wchan": "nfs_wait_bit_killable"}] * 3))
    assert group.headline() == (
        "rank 3 on n1: waits in the kernel in nfs_wait_bit_killable (state D: a disk, a file server or a driver), "
        "at train.py:91 in train, used 0.0 s of CPU"
    )


def test_a_rank_that_moves_has_the_frames_that_all_samples_share() -> None:
    def frames(line: int, *inner: list[Any]) -> dict[str, Any]:
        return {"frames": [*inner, ["/home/train.py", line, "epoch"], ["/home/train.py", 120, "<module>"]]}

    group = group_of(sampled(0, frames(50, ["/home/net.py", 3, "forward"]), frames(52), frames(50), cpu_s=0.8))
    assert (group.first.state, [frame[1] for frame in group.first.frames]) == ("moving", [0, 120])
    assert group.headline() == "rank 0 on n1: moving, at train.py in epoch, used 0.8 s of CPU"


def test_a_rank_holds_the_gil_if_its_own_thread_could_not_take_it() -> None:
    assert group_of(sampled(0, {}, {}, {}, gil_kept=True)).first.state == stacks.GIL
    assert group_of(sampled(0, {}, {}, {}, gil_kept=False)).first.state == stacks.STUCK


def test_a_collective_is_named() -> None:
    inner = [["/env/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce"]]
    group = group_of(sampled(0, *[{"frames": [*inner, ["/home/train.py", 91, "train"]]}] * 3))
    assert (
        "rank 0 on n1: waits in all_reduce called at train.py:91 in train, the same line in 3 of 3" in group.headline()
    )
    shown = list(stacks.lines([group], [], []))
    assert shown[1:] == ["    all_reduce (torch/distributed/distributed_c10d.py:3000)", "    train (train.py:91)"]


def test_512_ranks_become_three_groups() -> None:
    """The smallest group is first; a rank in a bad state is before it."""

    def one(rank: int) -> RankStack:
        line, state = (88, stacks.STUCK) if rank in (37, 81) else (91, stacks.STUCK)
        state = stacks.STOPPED if rank == 400 else state
        return RankStack(rank, f"n{rank // 8:02}", rank, state, (("/home/train.py", line, "f"),), "", 3, 3)

    groups = stacks.fold(map(one, range(512)))
    assert [group.ranks for group in groups][:2] == [(400,), (37, 81)]
    heads = [line for line in stacks.lines(groups, [], []) if line.startswith("rank")]
    assert heads[1].startswith("ranks 37,81 on n[04,10]: at train.py:88 in f, the same line in 3 of 3 samples")
    assert heads[2].startswith("ranks 0-36,38-80,82-399,401-511 on n[00-63]: at train.py:91"), heads[2]


def test_reports_between_other_lines() -> None:
    """Lines of two nodes arrive mixed with other output; a node whose report is incomplete has not answered."""
    first, second = ({"host": host, "ranks": [{"rank": 1, "title": os.urandom(900).hex()}]} for host in ("n1", "n2"))
    parts = [stack_collector.encoded(first), stack_collector.encoded(second)]
    assert all(len(line) < 1000 for lines in parts for line in lines) and len(parts[1]) > 1
    mixed = ["welcome to n1", *parts[0], parts[1][0], "slurmstepd: note"]
    assert stacks.decoded(mixed) == [first]
    assert stacks.decoded([*mixed, *parts[1][1:]]) == [first, second]


def test_the_name_of_the_file_in_memory() -> None:
    """The collector parses what the handler writes."""
    name = stack_signal.NAME.format(rank=3, pid=41, signal=64, main=0x7F00, thread=42, pipe=99)
    match = stack_collector.LABEL.match(f"/memfd:{name} (deleted)")
    assert match and match.groups() == ("3", "41", "64", "0x0000000000007f00", "42", "99")
