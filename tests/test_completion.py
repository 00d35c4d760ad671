"""Shell completion in real shells at a terminal: the command line after TAB."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.skip_or_fail import skip_or_fail

SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "--no-rcs", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
INSTALL = {
    "bash": 'eval "$(hpcinit -sc install=bash)"',
    "zsh": 'eval "$(hpcinit -sc install=zsh)"',
    "fish": "hpcinit -sc install=fish | source",
}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
TIMEOUT_S = 60
TO_START, TO_END, TAB = "\x01", "\x05", "\t"


class Terminal:
    """A shell in a pseudo-terminal: sends keys, and records all output."""

    def __init__(self, shell: str, folder: Path, completion: str) -> None:
        self.folder, self.shown = folder, ""
        env = {"PATH": PATH, "HOME": str(folder), "TERM": "xterm", "LC_ALL": "C.UTF-8"}
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(shell, SHELLS[shell], env)
        self.enter(completion)

    def enter(self, line: str) -> None:
        """Send these keys and ENTER, and wait until the shell has processed them."""
        ended = self.folder / "ended"
        os.write(self._fd, f"{line}\recho > ended\r".encode())
        deadline = time.monotonic() + TIMEOUT_S
        while not ended.exists():
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 0.05)[0]:
                self.shown += os.read(self._fd, 65536).decode(errors="replace")
        ended.unlink()

    def completed(self, line: str) -> str:
        """Return the command line after TAB at the end of `line`."""
        self.enter(f"{line}{TAB}{TO_START}echo {TO_END} > answer")
        return (self.folder / "answer").read_text().strip()

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a user's project with a script and a run, and ~/bin/hpcinit."""
    (tmp_path / "train.py").touch()
    (tmp_path / "runs/train-0001").mkdir(parents=True)
    (tmp_path / "runs/train-0001/submission.json").write_text('{"job_id": "1", "engine": "local"}')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/hpcinit").symlink_to(Path(sys.executable).parent / "hpcinit")
    return tmp_path


CASES = {
    "hpcinit stat": "hpcinit status",
    "hpcinit help wo": "hpcinit help world",
    "hpcinit logs tr": "hpcinit logs train-0001",
    "hpcinit submit cluster=mini time_mi": "hpcinit submit cluster=mini time_min=",
    "hpcinit submit cluster=mi": "hpcinit submit cluster=mini",
    "hpcinit submit job=mi": "hpcinit submit job=mi",
    "hpcinit submit -- trai": "hpcinit submit -- train.py",
    "hpcinit why --js": "hpcinit why --json",
    "hpcinit submit cluster=mini --multi": "hpcinit submit cluster=mini --multirun",
}


@pytest.mark.parametrize(
    ("shell", "install"),
    [*INSTALL.items(), ("zsh", INSTALL["bash"])],  # Hydra's --hydra-help sends zsh's users to bash's script
    ids=["bash", "zsh", "fish", "zsh-with-bash"],
)
def test_tab_completes(folder: Path, shell: str, install: str) -> None:
    """TAB completes commands, runs, keys, choices and files, and shows nothing when a config is broken."""
    if not shutil.which(shell):
        skip_or_fail(f"{shell} is not installed: its completion is not tested")
    terminal = Terminal(shell, folder, install)
    try:
        assert {line: terminal.completed(line) for line in CASES} == CASES
        assert terminal.completed("~/bin/hpcinit can") == f"{folder}/bin/hpcinit cancel"
        terminal.enter("export HPCINIT_CONF=nowhere")
        assert terminal.completed("hpcinit submit cluster=mi") == "hpcinit submit cluster=mi"
        assert "error" not in terminal.shown
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (
            "hpcinit ",
            "build-ops cancel clean discover doctor drill exec export logs nodes plan render report resubmit run shell stacks status submit timeouts watch why world",
        ),
        ("hpcinit submit cluster=lo", "cluster=local"),
        ("hpcinit doctor cluster=lo", "cluster=local"),
        ("hpcinit submit cluster=mini no", "nodes="),
        ("hpcinit submit cluster=mini partition=", "partition=high partition=main"),
        ("hpcinit submit cluster=mini partition=h", "partition=high"),
        ("hpcinit submit clust", "cluster. cluster="),
        ("hpcinit submit cluster=mini stop.margin", "stop.margin_s="),
        ("hpcinit submit +x", ""),
        ("hpcinit logs --runs-dir ./runs t", "train-0001"),
        ("hpcinit", ""),
        ("", ""),
    ],
)
def test_candidates(folder: Path, line: str, answer: str) -> None:
    """The answer to a shell is one complete candidate per line."""
    done = ask(folder, ["query=bash"], COMP_LINE=line)
    assert (done.stdout.split("\n")[:-1], done.stderr, done.returncode) == (answer.split(), "", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["install=csh"], "no completion for the shell 'csh', expected one of: bash, zsh, fish"),
        (["install"], "no completion for the shell '', expected one of: bash, zsh, fish"),
        ([], "--shell-completion: expected install=SHELL, where SHELL is one of: bash, zsh, fish"),
    ],
)
def test_an_unknown_shell(folder: Path, words: list[str], message: str) -> None:
    """An invalid --shell-completion gives one message with the choices, also after `submit`."""
    for command in ([], ["submit"]):
        done = ask(folder, words, *command)
        assert (done.stderr, done.stdout, done.returncode) == (f"hpcinit: error: {message}\n", "", 2)


def ask(folder: Path, words: list[str], *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["hpcinit", *command, "--shell-completion", *words], cwd=folder, env=os.environ | {"PATH": PATH} | env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
