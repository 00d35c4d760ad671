"""The step at which a run hangs: `hpcinit status` and `hpcinit why` show the same one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hpcinit.base import background_writer
from tests.conftest import Run
from tests.submitting import folder_of
from tests.waiting import until

# Steps much shorter than the interval in which rank 0 writes its progress; then rank 1 never calls the collective.
PROGRAM = """
import time, torch, torch.distributed as dist, hpcinit
with hpcinit.session() as run:
    for step in range(1, 26):
        dist.barrier()
        run.progress(step, 100)
    if run.rank == 1:
        time.sleep(600)
    dist.barrier()
"""


def test_status_and_why_show_the_same_step(hpcinit: Run, tmp_path: Path) -> None:
    """`why` also asks the ranks where they are now, and lists the one that does not wait before the others."""
    (tmp_path / "train.py").write_text(PROGRAM)
    done = hpcinit("submit", "cluster=local", "ranks_per_node=2", "launch=fork", "hang.after_s=2", "--", "train.py")
    run = folder_of(done)
    try:
        until(lambda: (run / "hang").is_dir() and "no step for " in hpcinit("why", str(run)).stdout)
        why = hpcinit("why", str(run)).stdout
        status = json.loads(hpcinit("status", "--json", str(run)).stdout)
        assert re.search(r"ranks 0-1 last finished step 25", why), why
        first, second = (line for line in why.splitlines() if line.startswith("  now: "))
        assert why.splitlines()[1] == first and re.match(r"  now: rank 1 on \S+: at train.py:8 in <module>", first), why
        assert re.match(r"  now: rank 0 on \S+: waits in barrier called at train.py:9 in <module>", second), why
        assert status["progress"]["step"] == 25 and "step 25/100" in hpcinit("status", str(run)).stdout, status
        assert json.loads(hpcinit("why", "--json", str(run)).stdout)["step"] == 25
    finally:
        hpcinit("cancel", str(run))


def test_the_last_report_is_written_without_another_call() -> None:
    """Of reports that follow each other faster than they may be written, the last one is written too."""
    written: list[int] = []
    for number in range(100):
        background_writer.later("a frequent report", lambda number=number: written.append(number), every_s=0.5)
    until(lambda: written[-1:] == [99])
    assert len(written) < 50
    background_writer.later("a frequent report", lambda: written.append(100), every_s=600)
    background_writer.later("a frequent report", lambda: written.append(101), every_s=600)
    assert background_writer.flush() and written[-1] == 101, "the end of the process does not wait for the interval"
