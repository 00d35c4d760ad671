"""Ranks and commands that are forked from a process with their modules behave as a Python that was started for them."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.runtime.spawned import Rank
from tests.submitting import printed
from tests.warm import Files, Warm

CODE = "import os, sys; print(os.environ['X'], os.getcwd(), __name__, sys.argv, sys.path[0] == '', 'torch' in sys.modules); sys.exit(7)"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_forked_rank_has_its_environment_folder_log_and_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """Both kinds of rank print the same and exit with the same status; only the forked one has torch from the start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    status, output = Rank(CODE, tmp_path / "log", {"X": "5"}, fresh).end()
    assert (status, output) == (7, f"5 {tmp_path} __main__ ['-c'] True {not fresh}\n")


def test_a_forked_rank_is_a_child_that_can_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wait() returns the signal like subprocess does."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    rank = Rank("import time; time.sleep(600)", tmp_path / "log", {})
    assert rank.process.poll() is None
    rank.process.send_signal(signal.SIGKILL)
    assert rank.end() == (-signal.SIGKILL, "")


@pytest.mark.parametrize("new", [{}, {"PYTHONHASHSEED": "1"}])
def test_a_forked_command_and_a_new_one_do_the_same(hpcinit: Run, tmp_path: Path, new: dict[str, str]) -> None:
    """Both print to two streams, use the folder, environment and umask of the test, and return the exit status."""
    done = hpcinit(
        "submit", "nodes=2", "name=x", "wait=true", "--", "sh", "-c", "umask; pwd; echo $X", env={"X": "5", **new}
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    os.umask(umask := os.umask(0o077))
    assert printed(tmp_path / "runs/x-0001", 1) == f"{umask:04o}\n{tmp_path}\n5\n"
    done = hpcinit("submit", "nodess=2", env=new)
    assert (done.returncode, done.stdout) == (2, "") and "nodess" in done.stderr
    assert done.args[1:] == ["-m", "hpcinit", "submit", "nodess=2"]


def forked(server: Warm, folder: Path, word: str) -> tuple[int, str]:
    with Path(os.devnull).open() as empty, (folder / word).open("w") as output:
        env = {**os.environ, "LONG": "x" * 60_000}  # such a request needs several reads
        process = server.start("import sys; print(sys.argv[1])", env, Files(empty, output, output), [word])
        return process.wait(60), (folder / word).read_text()


def test_requests_of_several_threads(tmp_path: Path) -> None:
    """Each thread gets its own process, with its own arguments and files."""
    server, words = Warm("commands"), [f"word{number}" for number in range(64)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda word: forked(server, tmp_path, word), words))
    assert found == [(0, f"{word}\n") for word in words]


def test_a_server_that_was_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request fails; the next one starts another server."""
    servers: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **more: servers.append(popen(*words, **more)) or servers[-1]
    )
    server = Warm("commands")
    assert forked(server, tmp_path, "one") == (0, "one\n")
    servers[0].kill()
    servers[0].wait(20)
    with pytest.raises(RuntimeError, match="the process that forks commands has exited"):
        forked(server, tmp_path, "two")
    assert forked(server, tmp_path, "three") == (0, "three\n")
