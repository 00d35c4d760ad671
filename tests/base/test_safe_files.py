"""Atomic writes: a reader never sees a half-written file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base import safe_files


def test_a_new_file_replaces_the_old_one(tmp_path: Path) -> None:
    """A reader with the old file open still reads it completely, and no temporary file remains."""
    path = tmp_path / "x.json"
    safe_files.write_atomically(path, "old")
    with path.open() as reader:
        safe_files.write_atomically(path, "new ä")
        assert (reader.read(), path.read_text(encoding="utf-8")) == ("old", "new ä")
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.unmeasured("no file of its process can grow, so coverage.py could write nothing either")
def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """On a full disk the old content is kept, and no temporary file remains. A file size limit simulates the disk."""
    safe_files.write_atomically(tmp_path / "x.json", "old")
    code = (
        "import resource, signal; from pathlib import Path; from hpcinit.base import safe_files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: safe_files.write_atomically(Path('x.json'), 'n' * 100_000)\n"
        "except OSError as error: print(error.strerror)"
    )
    # No preexec_fn: behind its fork coverage.py sets its variable again.
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("File too large\n", "")
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"] and (tmp_path / "x.json").read_text() == "old"
