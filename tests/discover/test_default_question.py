"""`hpcinit discover` in a terminal asks whether the new cluster becomes the default."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm


@pytest.mark.slurm
@pytest.mark.parametrize(("answer", "default"), [("y", True), ("", False)])
def test_the_question_in_a_terminal(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, answer: str, default: bool) -> None:
    """After y, submissions without cluster=... use the cluster; after Enter they do not."""
    env = {**os.environ, **slurm.env, "HOME": str(tmp_path)}
    env.pop("HPCINIT_CLUSTER", None)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "hpcinit", "discover", "--name", "here"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    try:
        while b"[y/N]" not in shown:
            shown += os.read(master, 65_536)
        os.write(master, f"{answer}\n".encode())
        while data := os.read(master, 65_536):
            shown += data
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(240) == 0, shown
    text = shown.decode()
    assert "use cluster=here whenever `hpcinit submit` gets no cluster=...? [y/N] " in text
    settings = tmp_path / ".config/hpcinit/settings.yaml"
    assert settings.exists() == default and ("the default cluster is here" in text) == default, text
    if default:
        dry_run = [*command[:3], "submit", "dry_run=true", "--", "true"]
        done = subprocess.run(dry_run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "#SBATCH --partition=main" in done.stdout, done.stderr
