"""The soft limit of open files: every rank raises its own, however it was started."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcinit.base import processes
from tests.forking import Node
from tests.runtime.spawned import free_port

LOW = 256
PRINTS = "import json, resource\nprint(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))\n"
RANK = {"HPCINIT_STARTED_BY": "env", "MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def low() -> Iterator[int]:
    """Give processes that the test starts a soft limit of LOW. Return the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def needed(ranks: int, hard: int) -> list[int]:
    most = 1024 + 10 * ranks
    return [most if hard == resource.RLIM_INFINITY else min(hard, most), hard]


def printed(*words: str) -> list[int]:
    env = {**os.environ, **RANK, "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=True, timeout=120)
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_rank_of_hpcinit_run(tmp_path: Path, low: int) -> None:
    """hpcinit.run raises the limit before the program starts."""
    (tmp_path / "prints.py").write_text(PRINTS)
    assert printed("-m", "hpcinit.run", str(tmp_path / "prints.py")) == needed(1, low)


def test_a_rank_that_calls_init_alone(low: int) -> None:
    """hpcinit.init raises it in a rank that hpcinit did not start."""
    assert printed("-c", f"import hpcinit\nwith hpcinit.session():\n    {PRINTS.replace(chr(10), '; ')}") == needed(
        1, low
    )


def test_a_forked_rank(tmp_path: Path, low: int) -> None:
    """Every rank that the fork server forks has the limit of a job of that size."""
    started = Node(tmp_path, PRINTS, 3)
    assert started.end() == (0, "") and [started.printed(rank) for rank in range(3)] == [needed(3, low)] * 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 100_000), (1024 + 10_000, 100_000)),
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (1024 + 10_000, resource.RLIM_INFINITY)),
        ((65_536, 100_000), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_thousand_ranks(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int] | None
) -> None:
    """The soft limit rises to what 1,000 ranks need, never above the hard one, and never falls."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    processes.raise_open_files_limit(1000)
    assert asked == ([after] if after else [])


def test_a_limit_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that cannot be raised is not an error."""

    def refuse(_: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 100_000))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    processes.raise_open_files_limit(1000)
