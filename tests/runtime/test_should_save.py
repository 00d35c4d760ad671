"""run.should_save(): all ranks save at the same steps, after the measured cost of a save, within the user's bounds."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.records import training_spans
from hpcinit.records.save_interval import best_interval_s
from hpcinit.records.training_spans import SpanRecord
from hpcinit.runtime.lifecycle import save_timing
from tests.runtime.spawned import ranks
from tests.runtime.test_stopping import END, last_lines

TRAIN = """
import time
from datetime import timedelta
import torch, torch.distributed as dist
import hpcinit
run = hpcinit.init(backend="gloo")
saved = []
for step in range(200):
    time.sleep(0.01 * (1 + run.rank))
    dist.all_reduce(torch.ones(1))
    if run.should_save(least=timedelta(seconds=1), most=timedelta(seconds=1.5)):
        saved.append(step)
        time.sleep(0.3)
print("saved at", *saved)
"""


def test_all_ranks_save_at_the_same_steps(tmp_path: Path) -> None:
    """Ranks of different speed save at the same steps, and rank 0 prints the choice and its reasons once."""
    with ranks(TRAIN + END, 2, tmp_path) as found:
        lines = last_lines(found)
    assert len(set(lines)) == 1, lines
    steps = [int(word) for word in lines[0].split()[2:]]
    assert 2 <= len(steps) <= 5 and all(20 < b - a < 110 for a, b in pairwise(steps)), lines
    text = (tmp_path / "rank-0.log").read_text()
    assert text.count("run.should_save() requests a save every 0.025 min. Training waits 0.") == 1, text
    assert re.search(
        r"a failure is expected every [\d.e+]+ h on 1 node \(0 failures in this run so far\)\. The best would be [\d.]+ min",
        text,
    )
    assert "run.should_save()" not in (tmp_path / "rank-1.log").read_text()


def test_the_failures_of_earlier_attempts_count(tmp_path: Path) -> None:
    """Restarts of this run are failures, except after a time limit, and its training time is that of all attempts."""
    restarts = [{"job": "43", "restart": at, "time": 0, "reason": why} for at, why in ((1, "hang"), (2, "time_limit"))]
    (tmp_path / "restarts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in restarts))
    folder = tmp_path / "timeline/43.0.0"
    folder.mkdir(parents=True)
    record = SpanRecord(100.0)
    record.step(1, 130.0)
    record.step(2, 160.0)
    (folder / training_spans.FILE).write_text(record.to_json())
    assert save_timing.history(tmp_path) == (1, 60.0)


def test_the_formula() -> None:
    """Daly's interval is near Young's for cheap saves, and never longer than the time between failures."""
    assert abs(best_interval_s(1, 36_000) / (2 * 36_000) ** 0.5 - 1) < 0.01
    assert best_interval_s(100, 40) == 40


@pytest.mark.parametrize("bounds", [(0, 10), (10, 5)])
def test_wrong_bounds(bounds: tuple[int, int], tmp_path: Path) -> None:
    """Bounds that are not positive or not in order are refused."""
    from hpcinit.runtime.runtime import Runtime

    class Session:
        save_timing = None

    run = Runtime.__new__(Runtime)
    object.__setattr__(run, "_session", Session())
    with pytest.raises(RequestError, match=r"run.should_save\(least=.*, most=.*\): expected 0 < least <= most"):
        run.should_save(timedelta(seconds=bounds[0]), timedelta(seconds=bounds[1]))
