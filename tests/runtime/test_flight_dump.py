"""The dump on demand: 8 real ranks over gloo, of which one causes a hang that hpcinit detects itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcinit.runtime.lifecycle import flight_dump
from hpcinit.why import flight_recorder, hang_verdict
from tests.runtime.spawned import ranks
from tests.runtime.test_heartbeat import report
from tests.waiting import until

FAULTY = 3
# Rank 3 causes a hang at one of these steps. 20: an endless loop, until the test ends it. 30: C code that holds the GIL.
# 40: the test stops it. 50: another collective. 55: it skips a collective.
TRAIN = """
import ctypes, os, time
from pathlib import Path
import torch, torch.distributed as dist
import hpcinit
from hpcinit.records.spec import Hang
run = hpcinit.init(backend="gloo")
object.__setattr__(run, "folder", Path(os.environ["FOLDER"]))
object.__setattr__(run.plan, "hang", Hang(after_s=float(os.environ.get("AFTER_S", "2"))))
halves = [dist.new_group(list(range(4 * half, 4 * half + 4)), group_desc="tp") for half in (0, 1)]
def fault(step):
    while step != 20 and list(Path("flight").glob("*.rank_*")):  # of the hang before
        time.sleep(0.05)
    (Path(os.environ["FOLDER"]) / f"fault-{step}").write_text(f"{time.time()} {os.getpid()}")
    if step == 20:
        while not Path("go").exists():
            pass
    elif step == 30:
        ctypes.PyDLL(None).open(b"pipe", 0)
    elif step == 40:
        while not Path("stopped").exists():
            time.sleep(0.01)
for step in range(60):
    time.sleep(0.02)
    if run.rank == 3 and step in map(int, os.environ["FAULTS"].split()):
        fault(step)
    group = halves[run.rank // 4]
    if run.rank == 3 and step == 55 and "55" in os.environ["FAULTS"]:
        pass
    elif run.rank == 3 and step == 50 and "50" in os.environ["FAULTS"]:
        dist.broadcast(torch.ones(4), 3, group=group)
    else:
        dist.all_reduce(torch.ones(4), group=group)
    dist.all_reduce(torch.ones(1))
    run.progress(step, 60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "errors").mkdir()
    (tmp_path / "disk").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for name, value in (("FOLDER", tmp_path), ("TMPDIR", tmp_path / "disk"), ("HPCINIT_RUN", "")):
        monkeypatch.setenv(name, str(value))
    return tmp_path


def found(folder: Path) -> Mapping[int, Mapping[str, object]]:
    return flight_recorder.read_folder(folder / "flight") if (folder / "flight").exists() else {}


def verdict(folder: Path) -> hang_verdict.HangVerdict:
    return hang_verdict.verdict(found(folder))


def named(folder: Path) -> set[tuple[int, str]]:
    return {(one.rank, one.kind) for one in verdict(folder).culprits}


def test_the_verdict_before_any_timeout(folder: Path) -> None:
    """The verdict is in dumps that hpcinit wrote. When the training continues, it removes them."""
    with ranks(TRAIN, 8, folder, FAULTS="20 50"):
        until(lambda: len(found(folder)) == 8 and named(folder) == {(FAULTY, "not-called")})
        [culprit] = verdict(folder).culprits
        assert (culprit.description, culprit.number, culprit.waiting_ranks) == ("tp", 21, (0, 1, 2))
        assert verdict(folder).victims == (0, 1, 2, 4, 5, 6, 7), "the members of gloo's groups are in the dumps"
        (folder / "go").touch()
        until((folder / "fault-50").exists)
        until(lambda: len(found(folder)) == 8 and named(folder) == {(FAULTY, "mismatch")})
        [path] = (folder / "flight").glob("*.rank_5")
        document = json.loads(path.read_text())
    assert "rank 3 called broadcast of [4] Float where ranks 0-2 called all_reduce" in verdict(folder).lines()[0]
    assert {"version", "entries", "pg_status", "pg_config", "written_ns"} <= document.keys()
    assert "[4, 5, 6, 7]" in {group["ranks"] for group in document["pg_config"].values()}


def test_a_rank_that_holds_the_gil(folder: Path) -> None:
    """It writes no dump, and the others name it."""
    with ranks(TRAIN, 8, folder, FAULTS="30"):
        until(lambda: len(found(folder)) == 7 and named(folder) == {(FAULTY, "no-dump")})
        until(lambda: "holds the GIL" in report(folder))


def test_a_rank_that_is_stopped(folder: Path) -> None:
    with ranks(TRAIN, 8, folder, FAULTS="40") as started:
        until((folder / "fault-40").exists)
        started[FAULTY].process.send_signal(signal.SIGSTOP)
        until(lambda: len(found(folder)) == 7 and named(folder) == {(FAULTY, "no-dump")})
        until(lambda: "is stopped" in report(folder))


def test_a_rank_that_skips_a_collective(folder: Path) -> None:
    """It waits in the next collective of all ranks, while its group waits for it."""
    with ranks(TRAIN, 8, folder, FAULTS="55"):
        until(lambda: len(found(folder)) == 8 and named(folder) == {(FAULTY, "mismatch")})


def test_nccl_is_asked_through_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte arrives in the pipe of this rank. There is no GPU here: the test makes the pipe that NCCL would make."""
    monkeypatch.setenv(flight_dump.PIPE, f"{tmp_path}/flight_")
    assert not flight_dump._ask_nccl(3), "no pipe: no process group of NCCL"
    os.mkfifo(tmp_path / "flight_3.pipe")
    assert not flight_dump._ask_nccl(3), "no reader: the process group has ended"
    reader = os.open(tmp_path / "flight_3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert flight_dump._ask_nccl(3) and os.read(reader, 9) == b"1"
    os.close(reader)
