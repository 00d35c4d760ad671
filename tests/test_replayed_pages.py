"""Run the commands in the console blocks of the pages for users on a real Slurm, and compare the output."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.minislurm import MiniSlurm
from tests.waiting import until

PAGES = ("getting-started", "checks", "why", "hangs", "nodes")  # in this order, in one folder
PAGE = "".join((Path(__file__).parent.parent / f"docs/{name}.md").read_text() for name in PAGES)
CONSOLE = "".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    (command, shown.splitlines())
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", CONSOLE, re.MULTILINE)
]
PROGRAMS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)


def plain(text: str, home: str = "/home/me") -> str:
    """Return the text without numbers, the blanks around them, and this test's folder."""
    return re.sub(r" {2,}", "  ", re.sub(r"\d+(\.\d+)*", "0", text.replace(home, "/home/me")))


def fits(shown: list[str], seen: str, home: str) -> bool:
    """Return whether the output `seen` matches the page; '...' matches any lines, and '^C' is the user's."""
    lines = [r"(?:.*\n)*?" if line == "..." else re.escape(plain(line)) + r"\n" for line in shown if line != "^C"]
    return (
        re.fullmatch("".join(lines), "".join(f"{line}\n" for line in plain(seen, home).splitlines() if line))
        is not None
    )


def typed(command: str, env: dict[str, str], interrupt_at: str = "") -> str:
    """Return the output of the command. interrupt_at: send Ctrl-C after this text."""
    process = subprocess.Popen(
        command, shell=True, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert process.stdout
    seen = ""
    if interrupt_at:
        while interrupt_at not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        os.killpg(process.pid, signal.SIGINT)
    return seen + process.communicate(timeout=240)[0]


def test_differences_are_found() -> None:
    """Numbers and the folder may differ; other text, and the number of lines, may not."""
    shown = ["job 2 in /home/me/runs", "...", "rank 1 failed"]
    assert fits(["hangs-0001     12  RUNNING"], "hangs-0001    222  RUNNING\n", "/tmp/x")
    assert fits(shown, "job 17 in /tmp/x/runs\nany\nthing\nrank 0 failed\n", "/tmp/x")
    for other in (
        "job 2 in /tmp/x/runs\nrank 1 fails\n",
        "rank 1 failed\n",
        "job 2 in /tmp/x/runs\nrank 1 failed\nmore\n",
    ):
        assert not fits(shown, other, "/tmp/x")


@pytest.fixture
def _opened_again(idle_slurm: MiniSlurm) -> Iterator[None]:
    yield
    idle_slurm.run("scontrol", "update", "PartitionName=main", "State=UP")


@pytest.fixture
def _full(tmp_path: Path) -> Iterator[None]:
    """Mount a full disk in the user's folder."""
    (tmp_path / "full").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path / "full"], check=True)
    yield
    subprocess.run(["umount", tmp_path / "full"], check=True)


@contextmanager
def faulty(slurm: MiniSlurm) -> Iterator[None]:
    """Fill the shared memory of node n2."""

    def on_n2(*command: str) -> None:
        subprocess.run(slurm.inside("n2", command), check=True, capture_output=True)

    on_n2("mount", "-t", "tmpfs", "-o", "size=16m", "full", "/dev/shm")
    try:
        on_n2("fallocate", "--length", "16m", "/dev/shm/left-behind")
        yield
    finally:
        on_n2("umount", "/dev/shm")


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_opened_again", "_full")
def test_the_output_of_the_pages_is_real(
    idle_slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command of the pages prints what the page shows, in order, in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPCINIT_CLUSTER")
    env = {**os.environ, **idle_slurm.env, "HOME": str(tmp_path)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    for name, text in PROGRAMS:
        Path(name).write_text(text)
    assert (len(COMMANDS), len(PROGRAMS)) == (26, 5)
    for command, shown in COMMANDS:
        closed = "name=patience wait=true" in command
        if closed:
            idle_slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
        if command.startswith(("hpcinit why", "hpcinit status")):  # about a hang: wait until it is detected
            outputs: list[str] = []

            def fitting(command: str = command, shown: list[str] = shown, outputs: list[str] = outputs) -> bool:
                outputs.append(typed(command, env))
                return fits(shown, outputs[-1], str(tmp_path))

            with contextlib.suppress(AssertionError):
                until(fitting)
            assert fits(shown, outputs[-1], str(tmp_path)), f"$ {command}\n{outputs[-1]}"
        else:
            with faulty(idle_slurm) if command.startswith("hpcinit doctor") else nullcontext():
                seen = typed(command, env, "use another partition\n" if closed else "")
            assert fits(shown, seen, str(tmp_path)), f"$ {command}\n{seen}"
        if command == "hpcinit nodes":  # fits() ignores numbers
            assert typed("hpcinit nodes -q", env) == "n2\n"
        if command == "hpcinit cancel patience-0001":
            idle_slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
