"""Which version of a package is installed, without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcinit.base import versions


def test_a_name_without_a_version_is_read_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the folder's name tells nothing (setup.py develop), its PKG-INFO does; what is not there has no version."""
    (tmp_path / "old_way.egg-info").mkdir()
    (tmp_path / "old_way.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: old-way\nVersion: 0.18.5\n")
    (tmp_path / "new_way-2.9.0+cu128.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [versions.installed(name) for name in ("old-way", "New_Way", "no-way")] == ["0.18.5", "2.9.0+cu128", ""]
