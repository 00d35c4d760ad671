"""A rank records its start-up events."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hpcinit.records import timeline
from tests.conftest import Run
from tests.runtime.spawned import without_gloos_line
from tests.submitting import folder_of

TWICE = """
import hpcinit, os
run = hpcinit.init()
if os.fork() == 0:
    hpcinit.runtime.startup.reach("store")  # a data loader's worker: no rank
    os._exit(0)
os.wait()
hpcinit.shutdown()
run = hpcinit.init()
if run.rank == 1:
    os.kill(os.getpid(), 9)
"""

# A fork server that imports once and forks its ranks; the import of torch is a fake of 0.1 s.
FORKED = """
import os, sys, time
from pathlib import Path
from hpcinit.world import World
from hpcinit.runtime import startup
time.sleep(0.1)
for rank in range(2):
    if os.fork() == 0:
        world = World("slurm", rank, 2, rank, 2, 0, ("n1",), "n1", (29500,), "43.0.0")
        startup.begin_startup(world, Path(sys.argv[1]), first_line=True)
        startup.reach("imported")
        os._exit(0)
for rank in range(2):
    os.wait()
"""


def test_all_startup_events(hpcinit: Run, tmp_path: Path) -> None:
    """All events are recorded in order, with the timeout in force; later calls do not change them, and a killed rank
    loses none."""
    (tmp_path / "train.py").write_text(TWICE)
    submitted = time.time()
    done = hpcinit("submit", "ranks_per_node=2", "wait=true", "--", "train.py")
    (attempt,) = timeline.read(folder_of(done))
    wanted = [name for name in timeline.EVENTS if name not in ("submitted", "spawned", "forked")]
    for rank in attempt.ranks:
        assert list(rank.events) == wanted
        times = list(rank.events.values())
        assert times == sorted(times) and submitted - 1 < times[0] and times[-1] < time.time()
    assert attempt.ranks[0].clock == (0.0, 0.0)
    assert (clock := attempt.ranks[1].clock) and abs(clock[0]) <= clock[1] < 30  # one machine, one clock
    assert attempt.complete and (attempt.world_size, attempt.nodes, attempt.hosts) == (2, 1, ("127.0.0.1",))
    assert attempt.timeout_s == 304 and attempt.formula.startswith("min(3600, 300 + 3.5 x 1 node")
    (file,) = (folder_of(done) / "timeline").glob("*/*.jsonl")
    lines = [line for line in file.read_text().splitlines() if f'"{timeline.RETURNED}"' not in line]
    assert len(lines) == 2 * len(wanted) - 2 * 2  # the first line contains three of them


def test_forked_ranks(tmp_path: Path) -> None:
    """A forked rank has the events of its parent, and the time of the fork."""
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True, env=dict(os.environ), timeout=60)
    (attempt,) = timeline.read(tmp_path)
    assert [rank.rank for rank in attempt.ranks] == [0, 1]
    for rank in attempt.ranks:
        assert list(rank.events) == ["started", "interpreter", "forked", "imported"]
        interpreter, forked = rank.events["interpreter"], rank.events["forked"]
        assert rank.events["started"] <= interpreter < forked - 0.05 <= rank.events["imported"]
    first, second = (rank.events["started"] for rank in attempt.ranks)
    assert abs(first - second) < 0.01


def test_without_a_run_folder_nothing_is_written(tmp_path: Path) -> None:
    """A program without a submission writes no file."""
    code = "import hpcinit; run = hpcinit.init(); print(run.world_size)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert without_gloos_line(done.stdout) == "1\n" and not list(tmp_path.iterdir())
