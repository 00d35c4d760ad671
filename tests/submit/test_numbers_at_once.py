"""Real processes take numbers of runs at the same time, on a file system that is often full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.skip_or_fail import skip_or_fail

PROCESSES = 4
# Each claims a run folder many times. It gives every second number back, as a submission does that Slurm refused. It
# submits the others, and removes their folders. The file TAKEN/N exists while a process has the number N.
WORKER = """
import os, shutil, sys
from pathlib import Path
from hpcinit.base.errors import SubmitError
from hpcinit.submit import folder

runs, taken, submitted = map(Path, sys.argv[1:4])
print("ready", flush=True)
sys.stdin.readline()
full = done = 0
for _ in range(1000):
    try:
        path = folder.claim(runs, "x")
    except SubmitError as error:
        assert "file system is full" in str(error), error
        full += 1
        continue
    done += 1
    number = path.name
    os.close(os.open(taken / number, os.O_CREAT | os.O_EXCL))
    os.sched_yield()
    assert sorted(os.listdir(path)) == ["errors", "logs"], f"{number} was removed by another process"
    try:
        if done % 2:
            folder.mark_submitted(path, {"job_id": number})
            os.close(os.open(submitted / number, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        sys.exit(f"{number} was used twice")
    except OSError:  # full
        pass
    (taken / number).unlink()
    if (path / "submission.json").exists():
        shutil.rmtree(path)
    else:
        folder.discard(path)
print(full, done)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system with room for the marks of numbers and one or two run folders: a real tmpfs. It needs root, as the Slurm tests do."""
    if os.geteuid() != 0:
        skip_or_fail("needs a real Slurm, and this machine lacks: root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=27", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_number_is_given_back_only_by_the_submission_that_took_it(small_disk: Path, tmp_path: Path) -> None:
    """No process removes another one's folder or number, and no number is submitted twice, whatever fails meanwhile."""
    taken, submitted = tmp_path / "taken", tmp_path / "submitted"
    taken.mkdir()
    submitted.mkdir()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, small_disk / "runs", taken, submitted],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(PROCESSES)
    ]  # fmt: skip
    for process in started:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    assert [(err, status) for _, err, status in ended] == [("", 0)] * PROCESSES
    assert sum(int(out.split()[0]) for out, *_ in ended) > 0, "the file system was never full"
    assert len(list(submitted.iterdir())) > 0
