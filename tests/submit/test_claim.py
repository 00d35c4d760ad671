"""The same request, submitted by many processes in the same second, becomes one job."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError, SubmitError
from hpcinit.submit import folder
from tests.conftest import Run
from tests.minislurm import MiniSlurm

REQUEST = "0123456789ab"
AT_ONCE = 8
HOLD = """
import sys, time
from pathlib import Path
from hpcinit.base.errors import RequestError
from hpcinit.submit import folder
run = Path(sys.argv[1])
run.mkdir()
while time.time() < float(sys.argv[2]): pass
try:
    with folder.claim_held(run, "0123456789ab", 600):
        print("claimed", flush=True)
        sys.stdin.read()
except RequestError as error:
    print(error)
"""


def processes(command: list[str], amount: int, env: dict[str, str]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [word.replace("NUMBER", str(number)) for word in command], env={**os.environ, **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(amount)
    ]  # fmt: skip


@pytest.mark.slurm
@pytest.mark.parametrize(
    "words", [[], pytest.param(["--multirun", "seed=1,2"], marks=pytest.mark.more)], ids=["run", "sweep"]
)
def test_many_at_once(hpcinit: Run, idle_slurm: MiniSlurm, words: list[str]) -> None:
    """Of several simultaneous `hpcinit submit`, one submits, and the others report it."""
    line = ["submit", "cluster=mini", "+cluster.sbatch.begin=now+1hour", *words, "--", "true"]
    started = processes([sys.executable, "-m", "hpcinit", *line], AT_ONCE, idle_slurm.env)
    ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
    assert len(idle_slurm.run("squeue", "--noheader", "--format=%F").split()) == 1
    assert sorted(status for *_, status in ended) == [0] + [2] * (AT_ONCE - 1), ended
    for _, err, status in ended:
        assert status == 0 or "already queued as job " in err or "has been submitting the same request" in err
    assert len(list(Path("runs").glob("[!.]*"))) == 1
    assert hpcinit(*line[:1], "again=true", *line[1:], env=idle_slurm.env).returncode == 0


@pytest.mark.parametrize("left", ["nothing", "a stale claim", "half a claim"])
def test_one_of_many_processes_gets_the_claim(tmp_path: Path, left: str) -> None:
    """Exactly one process gets the claim, even if it must replace the claim of a process that is gone."""
    path = tmp_path / f".submitting-{os.getuid()}-{REQUEST}"
    if left == "a stale claim":
        with folder.claim_held(tmp_path / "run", REQUEST, 600):
            text = path.read_text()
        path.write_text(text.replace(f'"pid": {os.getpid()}', '"pid": 4194305'))  # above the highest possible pid
    elif left == "half a claim":
        path.write_text('{"host": ')
        os.utime(path, (1, 1))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "runNUMBER"), str(time.time() + 3)]
    started = processes(command, 2 * AT_ONCE, {})
    lines = [process.stdout.readline() for process in started if process.stdout]
    for process in started:
        process.communicate(timeout=150)
    assert lines.count("claimed\n") == 1, lines
    assert all("submitting the same request" in line for line in lines if line != "claimed\n"), lines
    assert not path.exists()


def foreign(run: Path, **other: object) -> Path:
    """Return a claim as written on another login node."""
    run.mkdir()
    path = run.parent / f".submitting-{os.getuid()}-{REQUEST}"
    fields = {"host": "login2", "boot": "1", "namespace": "pid:[1]", "pid": 7, "started": "1", "run": "/runs/x-0001"}
    path.write_text(json.dumps({**fields, "since": 0.0, "expires_s": 600.0, **other}))
    return path


def test_a_claim_of_another_host(tmp_path: Path) -> None:
    """It counts until it expires, by the file server's clock. The message names host, process and run folder."""
    run = tmp_path / "run"
    path = foreign(run)
    with pytest.raises(RequestError) as raised, folder.claim_held(run, REQUEST, 600):
        pass
    assert "process 7 on login2 has been submitting the same request since " in str(raised.value)
    assert "hpcinit status /runs/x-0001," in str(raised.value) and "again=true" in str(raised.value)
    os.utime(path, (time.time() - 601, time.time() - 601))
    with folder.claim_held(run, REQUEST, 600):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that could not be written completely is removed (a stand-in for a full disk)."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(folder, "asdict", fail)
    with pytest.raises(SubmitError, match="the file system is full"), folder.claim_held(run, REQUEST, 600):
        pass
    assert list(tmp_path.iterdir()) == [run]


def fail(_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_claim_that_was_replaced_stays(tmp_path: Path) -> None:
    """A process that was too slow does not remove the claim of a later process."""
    run = tmp_path / "run"
    run.mkdir()
    with folder.claim_held(run, REQUEST, 600):
        run.rmdir()
        path = foreign(run)
    assert path.exists()


def test_a_stale_claim_that_another_process_has_replaced(tmp_path: Path) -> None:
    """A claim that was taken between reading and removing the stale one is restored."""
    path = foreign(tmp_path / "run")
    folder._remove(path, "the text that was read before")
    assert json.loads(path.read_text())["host"] == "login2"
    folder._remove(path, path.read_text())
    assert not path.exists()


def test_an_unwritable_folder(tmp_path: Path) -> None:
    """The message names the folder and reports that nothing was submitted."""
    refused = pytest.raises(SubmitError, match=r"cannot write the run folder .*; nothing was submitted")
    with refused, folder.claim_held(tmp_path / "absent" / "run", REQUEST, 600):
        pass
