"""Slurm signals every process of a step: DataLoader workers must not end a rank that could still save."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import Run
from tests.runtime.spawned import ranks, without_gloos_line
from tests.runtime.test_stopping import END, last_lines
from tests.submitting import folder_of
from tests.waiting import until

DATA = """
import time
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.tensor(float(index))

def stuck(worker):
    time.sleep(1000)
"""
TRAIN = """
import os, signal, time
import torch, torch.distributed as dist
from data import Data, stuck
import hpcinit
run = hpcinit.init(backend="gloo")
def loader(persistent, method, **options):
    return torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, persistent_workers=persistent,
        multiprocessing_context=method, **{**run.loader_options(), **options})
for step, batch in enumerate(loader(PERSISTENT, METHOD)):
    time.sleep(0.05)
    dist.all_reduce(torch.ones(1))
    print("step", step, flush=True)
    if stop := run.should_stop():
        print(f"saved after {step}: {stop}", flush=True)
        break
"""
METHODS = ("fork", "spawn", "forkserver")
BY_METHOD = [pytest.param(method, marks=pytest.mark.more if method == "forkserver" else ()) for method in METHODS]


def training(method: str = "fork", persistent: bool = False) -> str:
    return TRAIN.replace("PERSISTENT", str(persistent)).replace("METHOD", repr(method))


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.py").write_text(DATA)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")


def below(pid: int) -> list[int]:
    """Return all descendants of a rank, workers before the process that started them."""
    return [child.pid for child in reversed(psutil.Process(pid).children(recursive=True))]


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def step(tmp_path: Path, ranks: Sequence[int], number: int) -> None:
    for rank in ranks:
        until(lambda rank=rank: f"step {number}\n" in (tmp_path / f"rank-{rank}.log").read_text())  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "persistent"),
    [
        ("fork", False),
        ("spawn", True),
        *(
            pytest.param(*each, marks=pytest.mark.more)
            for each in (("fork", True), ("spawn", False), ("forkserver", False), ("forkserver", True))
        ),
    ],
)
def test_a_signal_to_all_processes_leads_to_the_save(tmp_path: Path, method: str, persistent: bool) -> None:
    """SIGTERM reaches the workers half a second before their ranks, which then stop at the same step without an error."""
    with ranks(training(method, persistent) + END, 2, tmp_path) as found:
        step(tmp_path, [0, 1], 10)
        pids = [rank.process.pid for rank in found]
        for pid in itertools.chain.from_iterable(map(below, pids)):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        lines = last_lines(found)
    assert len(set(lines)) == 1 and re.fullmatch(r"saved after \d+: terminated by SIGTERM \(rank [01]\)", lines[0]), (
        lines
    )


@pytest.mark.parametrize("method", BY_METHOD)
def test_workers_that_are_still_starting_are_protected(tmp_path: Path, method: str) -> None:
    """The signal arrives while a worker imports torch, long before its loop, and has no effect."""
    code = training(method).replace(
        "for step, batch", "run.should_stop()\nprint('starts', flush=True)\nfor step, batch"
    )
    with ranks(code + END, 1, tmp_path) as found:
        until(lambda: "starts" in (tmp_path / "rank-0.log").read_text())
        pid = found[0].process.pid
        sent: set[int] = set()
        while "step 5\n" not in (tmp_path / "rank-0.log").read_text() and found[0].process.poll() is None:
            for child in below(pid):
                os.kill(child, signal.SIGTERM)
                sent.add(child)
            time.sleep(0.02)
        assert len(sent) >= 2, (tmp_path / "rank-0.log").read_text()
        os.kill(pid, signal.SIGTERM)
        lines = last_lines(found)
    assert re.fullmatch(r"saved after \d+: terminated by SIGTERM \(rank [01]\)", lines[0]), lines


@pytest.mark.parametrize("method", BY_METHOD)
def test_sigterm_ends_workers_without_should_stop(tmp_path: Path, method: str) -> None:
    """Without should_stop() SIGTERM ends a rank and its workers."""
    code = training(method).replace("if stop := run.should_stop():", "if stop := None:")
    with ranks(code + END, 1, tmp_path) as found:
        step(tmp_path, [0], 3)
        processes = [psutil.Process(pid) for pid in below(found[0].process.pid)]
        for process in [*(process.pid for process in processes), found[0].process.pid]:
            with contextlib.suppress(ProcessLookupError):  # the first signals may have ended it already
                os.kill(process, signal.SIGTERM)
        assert found[0].process.wait(150) in (-signal.SIGTERM, 1)  # 1: torch's error of a worker that died first
        until(lambda: not any(map(alive, processes)))


@pytest.mark.parametrize("method", BY_METHOD)
def test_a_worker_that_is_stuck_ends_with_its_loader(tmp_path: Path, method: str) -> None:
    """Process.terminate(), with which torch and multiprocessing end such a worker, works, and is no error."""
    code = training(method).partition("for step")[0] + (
        "run.should_stop()\n"
        f"batches = iter(loader(False, {method!r}, worker_init_fn=stuck))\n"
        "print('step 0', flush=True)\ntime.sleep(3)\n"
        "print([w.is_alive() for w in batches._workers], flush=True)\n"
        "batches._workers[0].terminate(); batches._workers[0].join(10)\n"
        "print([w.is_alive() for w in batches._workers], run.should_stop(), flush=True)\n"
    )
    with ranks(code + END, 1, tmp_path) as (rank,):
        step(tmp_path, [0], 0)
        workers = [psutil.Process(pid) for pid in below(rank.process.pid)]
        status, text = rank.end()
    assert status == 0 and "Error" not in text, text
    assert text.splitlines()[-2:] == ["[True, True]", "[False, True] None"]
    until(lambda: not any(map(alive, workers)))


# Each step takes a second after its batch has been read, and the ranks agree after each.
SLOW = (
    training()
    .replace("time.sleep(0.05)", "print('in step', step, flush=True); time.sleep(1)")
    .replace(
        "for step, batch",
        "object.__setattr__(run.plan, 'stopping', stop_reasons.Stopping(every_steps=1))\nfor step, batch",
    )
    .replace("import hpcinit", "import hpcinit\nfrom hpcinit.records import stop_reasons")
)


def test_a_worker_that_dies_after_the_signal_leads_to_the_save(tmp_path: Path) -> None:
    """If a worker is killed between the signal and the end of the step, the ranks still save."""
    with ranks(SLOW + END, 2, tmp_path) as found:
        until(lambda: "in step 3" in (tmp_path / "rank-1.log").read_text())
        victim = below(found[1].process.pid)[0]
        for rank in found:
            os.kill(rank.process.pid, signal.SIGTERM)
        time.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        lines = last_lines(found)
    assert lines[0] == lines[1] and lines[0].endswith(": terminated by SIGTERM (rank 0)"), lines
    assert f"DataLoader worker (pid {victim}) is killed by signal: Killed" in (tmp_path / "rank-1.log").read_text()


def test_a_worker_that_dies_of_sigterm_counts_as_the_signal(tmp_path: Path) -> None:
    """If a worker's code restores the default SIGTERM and the worker dies of it, its rank treats that as the signal."""
    (tmp_path / "data.py").write_text(
        DATA + "import signal\ndef dies(worker):\n    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    )
    code = SLOW.replace("import Data, stuck", "import Data, dies").replace(
        "num_workers=2", "num_workers=2, worker_init_fn=dies"
    )
    with ranks(code + END, 2, tmp_path) as found:
        until(lambda: "in step 3" in (tmp_path / "rank-1.log").read_text())
        os.kill(below(found[1].process.pid)[0], signal.SIGTERM)
        lines = last_lines(found)
    assert lines[0] == lines[1] and lines[0].endswith(": terminated by SIGTERM (rank 1)"), lines


def test_a_worker_that_dies_without_a_signal_to_stop_is_an_error(tmp_path: Path) -> None:
    """If a worker is killed during training, torch's error ends the rank, as without hpcinit."""
    with ranks(training() + END, 1, tmp_path) as found:
        step(tmp_path, [0], 10)
        os.kill(below(found[0].process.pid)[0], signal.SIGKILL)
        status, text = found[0].end()
    # The rank reads from the worker's socket at the same moment: torch then raises that error first.
    assert status == 1 and re.search("is killed by signal: Killed|^.*ConnectionResetError", text, re.M), text


@pytest.mark.more
def test_other_children_are_not_protected(tmp_path: Path) -> None:
    """terminate() ends a Process and a Pool, SIGTERM ends a child of os.fork() and a program that a rank starts; none of
    these signals reaches the rank."""
    (tmp_path / "data.py").write_text(DATA + "def wait():\n    time.sleep(1000)\n")
    code = (
        training().partition("for step")[0].replace("import Data, stuck", "import Data, wait")
        + """
import multiprocessing, subprocess
run.should_stop()
for method in ("fork", "spawn", "forkserver"):
    context = multiprocessing.get_context(method)
    batches = iter(loader(False, method))
    next(batches)
    process = context.Process(target=wait)
    process.start()
    time.sleep(1)
    process.terminate()
    process.join(20)
    print(method, process.exitcode)
    with context.Pool(2) as pool:
        print(pool.map(abs, [-1]))
pid = os.fork()
if pid == 0:
    time.sleep(1000)
os.kill(pid, signal.SIGTERM)
print(os.waitpid(pid, 0)[1], subprocess.run(["sh", "-c", "kill -TERM $$; echo alive"]).returncode)
time.sleep(0.5)
print(run.should_stop())
"""
    )
    with ranks(code + END, 1, tmp_path) as (rank,):
        status, text = rank.end()
    assert status == 0, text
    lines = without_gloos_line(text).splitlines()
    printed = [line for line in lines if not line.startswith(("hpcinit: ", "  "))]
    ended = [f"{method} {-signal.SIGTERM}" for method in METHODS]
    assert printed == [*itertools.chain.from_iterable((one, "[1]") for one in ended), "15 -15", "None"]


def test_a_cache_in_a_manager_survives_the_signal(tmp_path: Path) -> None:
    """The process of a multiprocessing.Manager, in which data sets share data between workers, survives too."""
    code = (
        training()
        .replace(
            "for step, batch",
            "import multiprocessing\nmanager = multiprocessing.Manager()\nkept = manager.dict()\nfor step, batch",
        )
        .replace('print(f"saved', 'kept[step] = 1; print(f"saved')
    )
    with ranks(code + END, 1, tmp_path) as found:
        step(tmp_path, [0], 10)
        pid = found[0].process.pid
        for child in [*below(pid), pid]:
            os.kill(child, signal.SIGTERM)
        lines = last_lines(found)
    assert re.fullmatch(r"saved after \d+: terminated by SIGTERM \(rank [01]\)", lines[0]), lines


def test_workers_on_this_machine_survive_cancel(hpcinit: Run, tmp_path: Path) -> None:
    """cluster=local: `hpcinit cancel` ends a job by SIGTERM to its process groups, workers first or not."""
    (tmp_path / "train.py").write_text(training())
    done = hpcinit("submit", "cluster=local", "ranks_per_node=2", "--", "train.py")
    folder = folder_of(done)
    logs = [folder / f"logs/rank-{rank}.log" for rank in (0, 1)]
    until(lambda: all(log.exists() and "step 10\n" in log.read_text() for log in logs))
    assert hpcinit("cancel", folder.name).returncode == 0
    until(lambda: all("saved after" in log.read_text() for log in logs), 60)
    assert not any("Error" in log.read_text() for log in logs)
