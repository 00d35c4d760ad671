"""Process titles: ps and top show which rank a process is, and its script."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Run
from tests.submitting import folder_of, printed

TITLE = "import sys; print(open('/proc/self/cmdline').read().strip(chr(0)), sys.argv, flush=True)"


def test_rank_and_script(hpcinit: Run, tmp_path: Path) -> None:
    """A rank's title is its number, the world size and the script's name; the program's own arguments do not change."""
    (tmp_path / "train.py").write_text(TITLE)
    done = hpcinit("submit", "nodes=2", "wait=true", "--", "train.py", "--lr", "1")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert printed(folder_of(done), rank) == f"rank {rank}/2 train.py ['train.py', '--lr', '1']\n"
