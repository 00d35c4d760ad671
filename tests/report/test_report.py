"""`hpcinit report`: the duration of each phase of start-up, and the slow ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.report import report_command, startup_phases, startup_table
from hpcinit.report.startup_phases import seconds
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.observe import synthetic
from tests.submitting import folder_of, submit

# Every Python of the job runs this first: the clock of the second node is 40 s ahead.
SKEW = """
import os, time
if os.environ.get("SLURM_NODEID") == "1":
    right = time.time
    time.time = lambda: right() + 40
"""
ABSENT = """
import os, time
if os.environ.get("SLURM_PROCID") == "2":
    time.sleep(600)
"""
TRAIN = """
import os, time
start = time.monotonic()
import torch, hpcinit
if os.environ["RANK"] == "3":  # slower than the other ranks, however busy this machine is
    time.sleep(3 + time.monotonic() - start)
hpcinit.init()
"""
SHAPE = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "wait=true"]


def test_a_slow_node_is_named(tmp_path: Path) -> None:
    """The node with slow imports is named, and its last rank as the one that all waited for."""
    (report,) = startup_table.gather_reports(synthetic.run(tmp_path / "run", 8, 8, slow="n0002"))
    rows = {line.split("  ")[1]: line for line in list(startup_table.report_lines(report))[2:-3]}
    assert "n0002 (ranks 8-15) " in rows["imports"]
    assert re.search(
        r"  last: rank (8|9|1[0-5]) on n0002, 1\d\.\d s after half of the ranks", rows["waits for all ranks *"]
    )
    assert "328 s; the longest wait was 1" in startup_table.timeout(report)
    document = startup_table.document(report)
    (imports,) = [phase for phase in document["phases"] if phase["ends"] == "imported"]
    assert imports["slowest"][0]["ranks"] == list(range(8, 16)) and imports["slowest"][0]["whole_node"]


def test_an_absent_rank_and_a_restart(tmp_path: Path) -> None:
    """Each attempt has its own report; that of the first names the absent rank and the progress of the others."""
    run = synthetic.run(tmp_path / "run", 4, 2, absent=5)
    synthetic.run(run, 4, 2, restart=1)
    again = {"job": "43", "restart": 1, "time": synthetic.START + 390, "reason": "failure"}
    (run / "restarts.jsonl").write_text(json.dumps(again) + "\n")
    first, second = (list(startup_table.report_lines(report)) for report in startup_table.gather_reports(run))
    assert "not all ranks are ready" in first[0] and "rank 5 did not start: no timeline entry" in first
    assert any(line.startswith("ranks 0-4,6-7 on n0001, n0002, n0003, n0004 stopped after 'device'") for line in first)
    assert "job 43.0.1: 8 ranks on 4 nodes (slurm)" in second[0]
    assert any(line.startswith("  queue") and " 10.0 s" in line for line in second)  # since the restart, not before


def test_a_program_without_init(tmp_path: Path) -> None:
    """The timeline of a script without hpcinit.init() ends early, but no rank is reported as missing."""
    (report,) = startup_table.gather_reports(synthetic.run(tmp_path / "run", 2, 2))
    recorded = ("submitted", "started", "interpreter", "met")
    ranks = [
        replace(rank, events={name: rank.events[name] for name in recorded if name in rank.events})
        for rank in report.attempt.ranks
    ]
    without = startup_phases.startup_phases(replace(report.attempt, ranks=tuple(ranks)))
    assert startup_table.headline(without).endswith(", the program has not called hpcinit.init()")
    assert startup_phases.missing_ranks(without)[-1].startswith(
        "a program that calls init_process_group instead of hpcinit.init()"
    )
    one_late = replace(report.attempt, ranks=(*ranks[:3], report.attempt.ranks[3]))
    assert startup_table.headline(startup_phases.startup_phases(one_late)).endswith(", not all ranks are ready")


@pytest.mark.parametrize(("late_s", "queue"), [(-0.1, [0.1]), (0.4, [0.0]), (1.1, [])])
def test_a_job_that_starts_at_once(tmp_path: Path, late_s: float, queue: list[float]) -> None:
    """The queue time is never negative: Slurm rounds the start down to a second, and a late record is ignored."""
    run = synthetic.run(tmp_path / "run", 1, 2)
    record = json.loads((run / "submission.json").read_text()) | {"submitted": synthetic.START + late_s}
    (run / "submission.json").write_text(json.dumps(record))
    (report,) = startup_table.gather_reports(run)
    assert [round(phase.most, 6) for phase in report.phases if phase.ends == "allocated"] == queue


def test_a_node_without_a_rank(tmp_path: Path) -> None:
    """With one rank per node, the node of the absent rank is named."""
    (report,) = startup_table.gather_reports(synthetic.run(tmp_path / "run", 4, 1, absent=2))
    assert "rank 2 did not start: no timeline entry; no rank of n0003 started" in list(
        startup_table.report_lines(report)
    )


def test_a_run_that_has_not_started(tmp_path: Path) -> None:
    """The message contains the missing folder and possible reasons."""
    (tmp_path / "submission.json").write_text('{"job_id": "43", "engine": "slurm"}')
    (tmp_path / "job.sh").touch()
    with pytest.raises(
        RequestError, match=r"/timeline contains no start-up timeline, .* reasons: job 43 has not started, "
    ):
        report_command.main([str(tmp_path)])


def test_a_sweep_without_a_start(hpcinit: Run, tmp_path: Path) -> None:
    """A sweep whose tasks wait has no ledger, and the message names it."""
    hpcinit("submit", "-m", "name=x", "seed=1,2", "dry_run=true")
    folder = tmp_path / "runs/x-0001"
    (folder / "0").mkdir(parents=True)
    (folder / "sweep.json").write_text('{"tasks": {"0": "seed=1", "1": "seed=2"}}')
    (folder / "submission.json").write_text('{"job_id": "43", "engine": "slurm", "sweep": []}')
    with pytest.raises(RequestError, match=r"no task of the sweep .*x-0001 has started"):
        report_command.main([str(folder)])


@pytest.mark.parametrize(
    ("value", "text"), [(0.0004, "0.4 ms"), (0.012, "12 ms"), (0.5, "0.50 s"), (3.21, "3.2 s"), (512.3, "512 s")]
)
def test_seconds(value: float, text: str) -> None:
    """Durations are rounded to two or three digits."""
    assert seconds(value) == text


@pytest.mark.slurm
def test_a_real_start_with_a_slow_rank_and_a_wrong_clock(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The slow rank is named, a clock that is 40 s ahead is corrected.

    The nodes share one clock, so the test changes time.time() on one of them.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "skew").mkdir()
    (tmp_path / "skew/sitecustomize.py").write_text(SKEW)
    done = submit(hpcinit, idle_slurm, *SHAPE, f"+job.env.PYTHONPATH={tmp_path}/skew", "--", "train.py", timeout=280)
    output = hpcinit("report", folder_of(done).name).stdout
    rows = {line.split("  ")[1]: line for line in output.splitlines() if line.startswith("  ")}
    assert re.search(r"rank 3 on \S+ \d+(\.\d)? s$", rows["imports"]), output
    assert "last: rank 3 on " in rows["waits for all ranks *"]
    assert {"queue", "Slurm starts the task", "Python starts", "first collective *", "rest of init"} <= rows.keys()
    assert re.search(r"corrected the clock of 1 node .*: \S+ by \+(39\.[89]|40\.)\d* s, accurate to", output), output
    assert re.search(r"= 307 s; the longest wait was \d", output)
    document = json.loads(hpcinit("report", "--json", folder_of(done).name).stdout)["attempts"][0]
    assert document["complete"] and all(phase["min_s"] > -1 for phase in document["phases"][1:])
    assert all(phase["spread_s"] < 39 for phase in document["phases"] if phase["ends"] == "collective")


@pytest.mark.slurm
def test_a_real_rank_that_does_not_start(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The report names the rank, and the last event of the others, which the start-up timeout ended."""
    (tmp_path / "train.py").write_text("import hpcinit; hpcinit.init()")
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent/sitecustomize.py").write_text(ABSENT)
    overrides = [f"+job.env.PYTHONPATH={tmp_path}/absent", "comm.timeout_base_s=20", "comm.timeout_per_node_s=0"]
    done = submit(hpcinit, idle_slurm, *SHAPE, *overrides, "--", "train.py", timeout=280)
    output = hpcinit("report", folder_of(done).name).stdout
    assert "rank 2 did not start: no timeline entry" in output and "not all ranks are ready" in output, output
    assert re.search(r"ranks? [013].* stopped after '(device|imported|met)'", output), output
    assert "= 20 s" in output
