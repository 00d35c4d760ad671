"""What every test can use: hpcinit as its users run it, in a folder of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hpcinit.submission import environment

pytest_plugins = ["tests.minislurm.plugin"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True, scope="session")
def _not_a_job() -> None:
    """The tests may themselves run inside an allocation: its variables must not reach them."""
    clean, _ = environment.clean(os.environ)
    os.environ.clear()
    os.environ.update({k: v for k, v in clean.items() if k != "HPCINIT_CONF"})
    os.environ["OMP_NUM_THREADS"] = "1"
    # A shell that starts the tests with & has them ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hpcinit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`hpcinit("submit", "nodes=2", env={...})` as a process in tmp_path, its streams as text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(
        *words: str, env: Mapping[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hpcinit", *words],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
