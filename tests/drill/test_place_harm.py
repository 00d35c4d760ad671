"""What a drill removes and ends: only what its own ranks created, and its own processes, whatever looks like them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpcinit.drill import attempt
from hpcinit.drill.attempt import Attempt
from hpcinit.drill.place import Place, leftover
from hpcinit.runtime import drill_recorder

# A rank of the attempt `folder`, whose node-local folder is `node`.
RANK = """
import sys
from pathlib import Path
from hpcinit.runtime import drill_recorder
node, folder = Path(sys.argv[1]), Path(sys.argv[2])
drill_recorder.NODE_LOCAL = (str(node),)
guard = drill_recorder._Guard(folder)
sys.addaudithook(guard.on_event)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "work").mkdir()
    (tmp_path / "node").mkdir()
    made = Place(tmp_path / "work")
    yield made
    shutil.rmtree(made.root, ignore_errors=True)


def rank(place: Place, node: Path, code: str, folder: Path | None = None) -> str:
    """Run lines of a program as a rank of a drill, and return what it printed on stderr."""
    command = [sys.executable, "-c", RANK + code, str(node), str(folder or place.next_attempt())]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_a_folder_that_another_job_fills(place: Place, tmp_path: Path) -> None:
    """The folder existed before. Its times are new, because another job writes into it during the drill."""
    other = tmp_path / "node/cache"
    other.mkdir()
    (other / "shard-1").write_text("of the other job")
    code = "(node / 'cache').mkdir(exist_ok=True)\n(node / 'cache/mine').write_text('x')\n"
    assert rank(place, tmp_path / "node", code) == ""
    place.remove()
    assert {path.name: path.read_text() for path in other.iterdir()} == {"shard-1": "of the other job"}


def test_a_file_that_another_job_wrote_during_the_drill(place: Place, tmp_path: Path) -> None:
    (tmp_path / "node/state").write_text("of the other job")
    error = rank(place, tmp_path / "node", "(node / 'state').write_text('x')\n")
    place.remove()
    assert (tmp_path / "node/state").read_text() == "of the other job"
    assert "PermissionError" in error and "outside the drill's folder" in error


def test_another_job_uses_the_folder_that_a_rank_created(place: Place, tmp_path: Path) -> None:
    """The rank's own file is removed. The folder and the file of the other job stay."""
    node = tmp_path / "node"
    assert rank(place, node, "(node / 'cache').mkdir()\n(node / 'cache/mine').write_text('x')\n") == ""
    (node / "cache/other").write_text("of the other job")
    place.remove()
    assert [path.name for path in (node / "cache").iterdir()] == ["other"]


def test_a_link_to_a_folder(place: Place, tmp_path: Path) -> None:
    """The link that a rank created is removed, and not what it points to."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_text("x")
    assert rank(place, tmp_path / "node", "import os\nos.symlink(node.parent / 'data', node / 'link')\n") == ""
    place.remove()
    assert (tmp_path / "data/file").exists() and not (tmp_path / "node/link").is_symlink()


def test_what_ranks_created_is_theirs(place: Place, tmp_path: Path) -> None:
    """A second rank and a second attempt may change it. Everything is removed at the end."""
    node, folder = tmp_path / "node", place.next_attempt()
    create = "(node / 'a/b').mkdir(parents=True, exist_ok=True)\n(node / 'a/b/c').write_text('x')\n"
    assert [rank(place, node, create, folder), rank(place, node, create, folder), rank(place, node, create)] == [""] * 3
    place.remove()
    assert list(node.iterdir()) == [] and not place.root.exists()


def test_the_folders_of_a_node() -> None:
    assert drill_recorder.NODE_LOCAL == ("/tmp", "/var/tmp", "/dev/shm")


def test_another_process_has_the_number_of_a_job_that_ended(place: Place, tmp_path: Path) -> None:
    """It is neither ended nor stopped nor counted as the job."""
    job, other = subprocess.Popen(["sleep", "300"]), subprocess.Popen(["sleep", "300"])
    one, rank_process = Attempt(place, tmp_path, place.root, job.pid, {}), psutil.Process(job.pid)
    assert one.running()
    job.kill()
    job.wait()
    one.pid = rank_process._pid = other.pid  # as if the kernel had given the number away
    assert one._engine is not None
    one._engine._pid = other.pid
    assert not one.running()
    one.kill()
    attempt.send([rank_process], signal.SIGSTOP)
    assert other.poll() is None and psutil.Process(other.pid).status() != psutil.STATUS_STOPPED
    other.kill()
    other.wait()


def test_copies_keep_the_order_of_change_times(place: Place) -> None:
    """A program may look for its newest checkpoint by ctime, which a copy cannot keep. Names and sizes differ from it."""
    for name in ("step_8", "step_32", "step_16"):
        (place.work / name).mkdir()
        (place.work / name / "data").write_text(name)
        time.sleep(0.03)
    run = place.now / "runs/train-0001"
    run.mkdir(parents=True)
    place.restore(place.copy_state("killed"))
    place.forget_reads()
    for order in ("step_*", "step_*/data"):
        found = sorted(place.work.glob(order), key=lambda path: path.stat().st_ctime_ns)
        assert [path.relative_to(place.work).parts[0] for path in found] == ["step_8", "step_32", "step_16"]


def test_hpcinits_own_files_in_tmpdir_are_no_checkpoint(tmp_path: Path) -> None:
    """With launch=fork, heartbeats are in TMPDIR. They were once reported as checkpoints in node-local storage."""
    (tmp_path / "tmp/hpcinit-0/1255.0.0-n1").mkdir(parents=True)
    (tmp_path / "tmp/hpcinit-0/1255.0.0-n1/heartbeats").write_text("x")
    (tmp_path / "tmp/mine").write_text("x")
    assert leftover(tmp_path) == {"mine": 1}
