"""What a node says when it cannot take the environment; the rest is shown on the real Slurm (test_to_local)."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcinit import local_environment
from hpcinit.facts import scratch


def said(archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The keeper's lines, without word and host, on a node whose local disk is the archive's folder."""
    monkeypatch.setenv(scratch.ENV_LOCAL_DISK, str(archive.parent))
    monkeypatch.setattr(sys, "stdin", io.StringIO("unpack\n"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert local_environment.main([str(archive), "/me/venv"]) == 0
    assert not list(archive.parent.glob("hpcinit-*/*"))
    return [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is free, what is needed, and the key that names another disk."""
    (tmp_path / "a.tar").write_bytes(b"")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**8))
    (line,) = said(tmp_path / "a.tar", monkeypatch, capsys)
    assert line.startswith(f"0.1 GB free in {tmp_path}/hpcinit-") and ", expected 0.3 GB (the archive and" in line
    assert line.endswith("cluster.local_disk=FOLDER names another disk")


def test_no_disk_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where all are mounted with noexec."""
    (tmp_path / "a.tar").write_bytes(b"")
    monkeypatch.setattr(scratch, "base", lambda env: None)
    (line,) = said(tmp_path / "a.tar", monkeypatch, capsys)
    assert line == "no folder on this node's disk may hold programs: cluster.local_disk=FOLDER names one"


def test_what_is_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """tar's own words, in one line."""
    (tmp_path / "a.tar").write_bytes(b"")
    room, no = said(tmp_path / "a.tar", monkeypatch, capsys)
    assert room.startswith(str(tmp_path)) and no.startswith(f"tar cannot unpack {room}/environment.tar: tar: ")
