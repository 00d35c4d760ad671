"""`hpcinit watch` of real jobs."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.observe.test_state import SMALL, counting_queries, statuses
from tests.submitting import submit
from tests.waiting import until


@pytest.mark.slurm
def test_until_all_are_over(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """Each change of a run or task is printed once, as a line or as JSON; the exit status is the highest one."""
    go = "until [ -e go ]; do sleep 0.1; done"
    program = ("sh", "-c", f"{go}; sleep 2; exit $(grep -c '^seed: 3' $HPCINIT_RUN/config.yaml)")
    submit(hpcinit, idle_slurm, *SMALL, "name=one", "--", "sh", "-c", f"{go}; sleep 4; exit 7")
    submit(hpcinit, idle_slurm, "-m", "seed=1,2,3", *SMALL, "name=many", "--", *program)
    env, queries = counting_queries(tmp_path)
    command = [sys.executable, "-m", "hpcinit", "watch", "--json"]
    objects = subprocess.Popen(command, env={**os.environ, **idle_slurm.env}, stdout=subprocess.PIPE, text=True)
    assert objects.stdout
    first = objects.stdout.readline()  # watch has seen both runs
    (tmp_path / "go").touch()
    start = time.monotonic()
    done = hpcinit("watch", "one-0001", "many-0001", env={**idle_slurm.env, **env}, timeout=200)
    assert done.returncode == 7 and done.stderr == ""
    assert done.stdout.count("FAILED  NonZeroExitCode  exit status 7") == 1 and done.stdout.count("many-0001/2 ") >= 1
    assert "many-0001: 2 COMPLETED, 1 FAILED" in done.stdout
    assert queries.read_text().split().count("squeue") <= time.monotonic() - start + 2
    out, _ = objects.communicate(timeout=150)
    changes = [json.loads(line) for line in (first + out).splitlines()]
    assert objects.returncode == 7
    ends = {Path(change["run"]).name: change["state"] for change in changes}
    assert ends == {"one-0001": "FAILED", "0": "COMPLETED", "1": "COMPLETED", "2": "FAILED"}
    seen = [(c["run"], c["state"], c["reason"], c["exit_status"], str(c["progress"])) for c in changes]
    assert len(seen) == len(set(seen))
    done = hpcinit("watch", env=idle_slurm.env)
    assert done.returncode == 0 and "have ended" in done.stderr


@pytest.mark.slurm
def test_in_a_terminal(idle_slurm: MiniSlurm, hpcinit: Run, tmp_path: Path) -> None:
    """A terminal shows a table with a progress bar that is redrawn; Ctrl-C does not cancel the job."""
    program = """import json, os, time
json.dump({"step": 20, "total": 60, "values": {"loss": 2.5}, "time": time.time()}, open(os.environ["HPCINIT_RUN"] + "/progress.json", "w"))
time.sleep(600)"""
    submit(hpcinit, idle_slurm, *SMALL, "name=one", "--", sys.executable, "-c", program)
    until(lambda: statuses(hpcinit, idle_slurm)[0]["progress"])
    terminal, program_end = pty.openpty()
    env = {**os.environ, **idle_slurm.env, "COLUMNS": "100", "LINES": "30", "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "hpcinit", "watch", "one-0001"]
    watch = subprocess.Popen(command, env=env, stdin=program_end, stdout=program_end, stderr=subprocess.PIPE, text=True)
    os.close(program_end)
    text = ""
    end = time.monotonic() + 60
    while text.count("20/60") < 2 and time.monotonic() < end:
        text += os.read(terminal, 10_000).decode()
    watch.send_signal(signal.SIGINT)
    _, errors = watch.communicate(timeout=150)
    os.close(terminal)
    assert text.count("20/60") >= 2 and "RUNNING" in text and "━" in text and "loss 2.5" in text and " left" in text
    assert watch.returncode == 130 and "stopped watching; the jobs continue" in errors
    assert statuses(hpcinit, idle_slurm, "one-0001")[0]["state"] == "RUNNING"
    assert "\x1b[3" not in text  # NO_COLOR


def test_what_cannot_be_watched(tmp_path: Path, hpcinit: Run) -> None:
    """Without runs, and for a folder without a submission record, there is an error message."""
    assert "no runs in" in hpcinit("watch").stderr
    (tmp_path / "runs/x-0001").mkdir(parents=True)
    (tmp_path / "runs/x-0001/job.sh").write_text("")
    done = hpcinit("watch", "x-0001")
    assert done.returncode == 2 and "Slurm did not confirm the job" in done.stderr
