"""The log of a rank on a full disk: print() raises nothing, and the log reports the lost bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.records import rank_log
from tests.small_disks import fill, small_disk

PRINTS = """
import sys
from pathlib import Path
from hpcinit.records import rank_log
if sys.argv[1] == "protect": rank_log.protect()
print("one", flush=True)
Path("one").touch()
while not Path("full").exists(): pass
for number in range(100): print("x" * 100, flush=True)
print("x" * 100, file=sys.stderr)
Path("two").touch()
while not Path("free").exists(): pass
print("three", flush=True)
"""


@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("how", ["protect", "leave"])
def test_print_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, unbuffered: bool) -> None:
    """A protected process completes; an unprotected one ends with Python's error."""
    monkeypatch.chdir(tmp_path)
    with small_disk(tmp_path / "disk") as place, (place / "log").open("ab") as log:
        command = [sys.executable, *["-u"] * unbuffered, "-c", PRINTS, how]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not Path("one").exists():
                assert process.poll() is None
            other = fill(place)
            Path("full").touch()
            while not Path("two").exists() and process.poll() is None:
                pass
            other.unlink()
            Path("free").touch()
            status = process.wait(30)
        finally:
            process.kill()
        text = (place / "log").read_text()
    assert status == (0 if how == "protect" else 1)
    if how == "protect":
        assert text.startswith("one\n") and text.endswith("three\n")
        assert "bytes of this log are lost: [Errno 28] No space left on device" in text


def test_a_log_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a full disk there is a warning and no log; a missing folder is an error."""
    with small_disk(tmp_path / "disk", "nr_inodes=1") as place, rank_log.opened(place / "rank-7.log") as log:
        assert log is None
    assert "rank-7.log: No space left on device; the output of this rank is in the log of" in capsys.readouterr().err
    with rank_log.opened(tmp_path / "rank-0.log") as log:
        assert log is not None
    with pytest.raises(FileNotFoundError), rank_log.opened(tmp_path / "none/rank-0.log"):
        pass
