"""installed() finds the version of a package without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcinit.base import versions


def test_a_metadata_folder_without_a_version_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder's name has no version (setup.py develop), PKG-INFO is read; a missing package gives ''."""
    (tmp_path / "old_way.egg-info").mkdir()
    (tmp_path / "old_way.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: old-way\nVersion: 0.18.5\n")
    (tmp_path / "new_way-2.9.0+cu128.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [versions.installed(name) for name in ("old-way", "New_Way", "no-way")] == ["0.18.5", "2.9.0+cu128", ""]
