"""Reports that cannot be written do not end a training run: real full disks, real ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.spawned import ranks
from tests.runtime.test_stopping import END
from tests.small_disks import fill, small_disk
from tests.waiting import until

# Each step waits for the file of its number, so that a test controls which disk is full at which step.
TRAIN = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
import hpcinit
from hpcinit.records.spec import Hang
with hpcinit.session(backend="gloo") as run:
    os.environ["HPCINIT_RUN"] = os.environ["FOLDER"]  # init would look for a spec there
    object.__setattr__(run, "folder", Path(os.environ["FOLDER"]))
    object.__setattr__(run.plan, "hang", Hang(after_s=float(os.environ.get("HANG_S", 2)), action=os.environ.get("ACTION", "report")))
    for step in range(1, 7):
        while not Path(f"go-{step}").exists():
            time.sleep(0.02)
        dist.all_reduce(torch.ones(1))
        run.progress(step, 6)
        run.should_stop()
        Path(f"done-{step}").touch()
    if "RESULT" in os.environ:
        run.result(float(os.environ["RESULT"]))
print("done", flush=True)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def scratch(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk as TMPDIR, which contains the ranks' private folder."""
    with small_disk(here / "scratch") as place:
        monkeypatch.setenv("TMPDIR", str(place))
        yield place


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk as the run folder."""
    with small_disk(here / "run") as place:
        (place / "errors").mkdir()
        monkeypatch.setenv("FOLDER", str(place))
        yield place


def go(*steps: int) -> None:
    for step in steps:
        Path(f"go-{step}").touch()


def test_a_full_scratch_disk_does_not_end_the_ranks(here: Path, scratch: Path, run: Path) -> None:
    """A rank without disk space for its heartbeat continues without one, with one warning."""
    fill(scratch)
    go(*range(1, 7))
    with ranks(TRAIN + END, 2, here) as found:
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], ends
    for _, text in ends:
        assert text.count("hpcinit: warning: this rank's heartbeat cannot be written: ") == 1, text
        assert "No space left on device" in text
    assert json.loads((run / "progress.json").read_text())["step"] == 6


def test_a_scratch_disk_without_inodes(here: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without inodes is handled like a disk without free bytes."""
    with small_disk(here / "scratch", "size=1m,nr_inodes=3") as place:
        folder = place / f"hpcinit-{os.geteuid()}"
        folder.mkdir(mode=0o700)
        (place / "last").touch()
        monkeypatch.setenv("TMPDIR", str(place))
        go(*range(1, 7))
        with ranks(TRAIN + END, 1, here) as found:
            status, text = found[0].end()
    assert status == 0 and "this rank's heartbeat cannot be written: " in text, text


def test_a_full_run_folder_during_training(here: Path, run: Path) -> None:
    """While progress and heartbeats cannot be written for some steps, there is one warning each; afterwards the last
    step is recorded."""
    with ranks(TRAIN + END, 1, here) as found:
        go(1)
        until(Path("done-1").exists, 60)
        other = fill(run)
        for step in (2, 3, 4, 5):  # progress is written once a second
            time.sleep(0.6)
            go(step)
            until(Path(f"done-{step}").exists, 60)
        other.unlink()
        go(6)
        status, text = found[0].end()
    assert status == 0, text
    assert text.count("hpcinit: warning: progress.json cannot be written: ") == 1, text
    assert json.loads((run / "progress.json").read_text())["step"] == 6


def test_errors_of_quotas_and_file_servers(here: Path, run: Path) -> None:
    """Every write in the run folder fails from step 2 to 5, with EDQUOT, EIO and ESTALE in turn (os.open and io.open are
    fakes)."""
    code = """
import builtins, errno, io, itertools, os
from pathlib import Path
real_open, real_io, errors = os.open, io.open, itertools.cycle([errno.EDQUOT, errno.EIO, errno.ESTALE])
def bad(path):
    if str(path).startswith(os.environ["FOLDER"]) and Path("done-1").exists() and not Path("done-5").exists():
        number = next(errors)
        raise OSError(number, os.strerror(number), str(path))
def failing(path, *texts, **more):
    bad(path)
    return real_open(path, *texts, **more)
def failing_io(path, *texts, **more):
    bad(path)
    return real_io(path, *texts, **more)
os.open, io.open, builtins.open = failing, failing_io, failing_io
"""
    go(1)
    with ranks(code + TRAIN.replace("run.should_stop()", "time.sleep(0.6)") + END, 1, here) as found:
        until(Path("done-1").exists, 60)
        go(2, 3, 4, 5)
        until(Path("done-5").exists, 60)
        go(6)
        status, text = found[0].end()
    assert status == 0, text
    assert "progress.json cannot be written: " in text and "heartbeats of this node cannot be written: " in text, text
    assert json.loads((run / "progress.json").read_text())["step"] == 6


def test_a_file_server_that_hangs_stops_no_step(here: Path, run: Path) -> None:
    """If the first write of progress.json blocks in the kernel (here in open(2) of a FIFO), the steps continue.

    The rank's exit waits for it for a limited time.
    """
    hanging = "path = os.environ['FOLDER'] + f'/progress.json.{os.getpid()}.tmp'\nos.mkfifo(path)\n"
    with ranks("import os\n" + hanging + TRAIN + END, 1, here, HANG_S="0") as found:
        go(*range(1, 7))
        until(Path("done-6").exists, 60)
        status, text = found[0].end()
    assert status == 0 and "done" in text, text
    assert "progress.json" in text and "not written within" in text, text


def test_a_hang_is_reported_on_a_full_disk(here: Path, run: Path) -> None:
    """Without stacks nothing shows that a rank waits for another one: hang.action=end does not end the ranks."""
    with ranks(TRAIN + END, 2, here, ACTION="end") as found:
        go(1, 2)
        until(Path("done-2").exists, 60)
        fill(run)
        logs = [here / f"rank-{rank}.log" for rank in range(2)]
        until(lambda: any("the ranks continue despite hang.action=end" in log.read_text() for log in logs), 60)
        go(3, 4, 5, 6)
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], ends
    assert any("the training hangs: " in text for _, text in ends), ends


def test_a_result_that_cannot_be_written(here: Path, run: Path) -> None:
    """The run succeeds, and rank 0's last line has the result and the file that could not be written."""
    with ranks(TRAIN + END, 1, here, RESULT="0.25", HANG_S="0") as found:
        go(*range(1, 6))
        until(Path("done-5").exists, 60)
        fill(run)
        go(6)
        status, text = found[0].end()
    assert status == 0, text
    assert f"cannot write {run}/result.json" in text and '{"value": 0.25}' in text, text


def test_a_result_is_written_when_there_is_space_again(here: Path, run: Path) -> None:
    """Writing the result is retried until the process exits."""
    later = (
        "import time\nfrom pathlib import Path\nPath('asked').touch()\n"
        + "while not Path('end').exists(): time.sleep(0.05)\n"
    )
    code = TRAIN.replace('print("done"', later + 'print("done"')
    with ranks(code + END, 1, here, RESULT="0.25", HANG_S="0") as found:
        go(*range(1, 6))
        until(Path("done-5").exists, 60)
        other = fill(run)
        go(6)
        until(Path("asked").exists, 60)
        other.unlink()
        Path("end").touch()
        status, text = found[0].end()
    assert status == 0 and json.loads((run / "result.json").read_text()) == {"value": 0.25}, text


def test_no_rank_dies_of_a_bus_error(here: Path, scratch: Path, run: Path) -> None:
    """Truncating the heartbeat file while the ranks train does not kill them."""
    with ranks(TRAIN + END, 2, here) as found:
        go(1, 2)
        until(Path("done-2").exists, 60)
        for table in scratch.glob("*/*/heartbeats"):
            os.truncate(table, 0)
        fill(scratch)
        go(3, 4, 5, 6)
        ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0, 0], (ends, -signal.SIGBUS)
