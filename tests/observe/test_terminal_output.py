"""Output of ranks in a terminal: it may contain data of another user."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base import console
from tests.conftest import Run

TITLE = "\x1b]0;owned\x07"
PROGRAM = r"""
import sys
print("\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x1b[2J\x9b2J \x1b[5;1Hmoved")
print(" 10%\r 50%\r100% done")
raise ValueError("bad \x1b]0;owned\x07\x1b[1A\x1b[2K name")
"""


def in_a_terminal(folder: Path, *arguments: str) -> str:
    """Return what `hpcinit ARGUMENTS` writes to a terminal."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    env.pop("NO_COLOR", None)  # rich 13.0 prints no colors even if it is empty
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcinit", *arguments], cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    written = b""
    try:
        while data := os.read(master, 65_536):
            written += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    process.wait(150)
    return written.decode()


def test_control_sequences_of_a_rank_do_not_reach_the_terminal(hpcinit: Run, tmp_path: Path) -> None:
    """No command prints control sequences of a rank to a terminal, except the colors of a log."""
    (tmp_path / "bad.py").write_text(PROGRAM)
    shown = {"submit": in_a_terminal(tmp_path, "submit", "wait=true", "name=bad", "--", "bad.py")}
    for command in ("logs", "why", "status", "watch", "report"):
        shown[command] = in_a_terminal(tmp_path, command, "bad-0001")
    for command, text in shown.items():
        assert text and "\x1b]" not in text and "\x07" not in text and "\x9b" not in text, (command, text)
        assert "\x1b[2J" not in text and "\x1b[5;1H" not in text and "\x1b[1A\x1b[2K name" not in text, (command, text)
    for command in ("logs", "why", "submit"):
        assert "\\x1b]0;owned\\x07" in shown[command], shown[command]
    for command in ("logs", "submit"):
        assert "\x1b[31mred" in shown[command] and "100% done" in shown[command] and " 50%" not in shown[command]


def test_other_outputs_get_every_byte(hpcinit: Run, tmp_path: Path) -> None:
    """`hpcinit logs` writes the log unchanged to a file or a pipe."""
    (tmp_path / "bad.py").write_text(PROGRAM)
    hpcinit("submit", "wait=true", "name=bad", "--", "bad.py")
    output = subprocess.run(
        [sys.executable, "-m", "hpcinit", "logs", "bad-0001"], cwd=tmp_path, capture_output=True, check=True, timeout=60
    ).stdout
    assert TITLE.encode() in output and b" 10%\r 50%\r100% done\n" in output and b"\x1b[5;1Hmoved" in output


def test_no_color_applies_to_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR, a terminal shows the lines of a program without the colors and styles that it printed."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.colored("\x1b[1;31mbold\x1b[0m \x1b[2J") == "bold \\x1b[2J"
