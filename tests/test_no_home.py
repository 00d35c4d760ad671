"""A user without HOME and without an entry in /etc/passwd, as in many containers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.base import text
from tests import other_user
from tests.other_user import User
from tests.skip_or_fail import skip_or_fail


@pytest.fixture
def nobody() -> Iterator[User]:
    if os.geteuid() != 0:
        skip_or_fail("needs root, to become a user without an entry in /etc/passwd")
    with other_user.without_entry() as user:
        yield user


@pytest.mark.parametrize(
    ("line", "status", "shown"),
    [
        ("submit dry_run=true -- true", 0, "/runs/true-0001"),
        ("submit cluster=mini dry_run=true -- true", 0, "/runs/true-0001"),
        ("submit cluster=local wait=true -- true", 0, "COMPLETED"),
        ("status", 2, "no runs in "),
        ("doctor", 1, "home folder: not found: HOME is not set, and uid 51234 has no entry in /etc/passwd"),
        ("nodes", 0, "no node failure is recorded"),
        ("timeouts", 0, "1024"),
        ("discover --print", 1, "scontrol"),
    ],
)
def test_commands_without_a_home_folder(nobody: User, line: str, status: int, shown: str) -> None:
    """Every command works or prints a message, without a traceback, and no folder named ~ is created."""
    done = nobody.run(sys.executable, "-m", "hpcinit", *line.split(), env={"HOME": "", "SLURM_CONF": "/nowhere"})
    assert "Traceback" not in done.stderr, done.stderr
    assert (done.returncode, shown in done.stdout + done.stderr) == (status, True), done.stdout + done.stderr
    assert not (nobody.home / "~").exists()


def test_the_home_folder_is_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """text.home() returns HOME."""
    monkeypatch.setenv("HOME", "/home/me")
    assert text.home() == Path("/home/me")
