"""The client of Slurm's commands, with stand-ins on PATH, because the real commands do not hang on demand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from hpcinit.base import console
from hpcinit.slurm import queue, scontrol, slurm_client
from tests.waiting import until

ENVIRONMENT = {"HOME": "/home/me", "SLURM_CONF": "/etc/x"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def stand_in(folder: Path, name: str, shell: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{shell}\n")
    (folder / name).chmod(0o755)


def test_every_command_has_one_timeout() -> None:
    """The longest matching entry applies, and a command without an entry is a bug in hpcinit."""
    assert slurm_client.timeout(["scontrol", "show", "config"]) == timedelta(seconds=30)
    assert slurm_client.timeout(["scontrol", "--all", "show", "node", "n1"]) == timedelta(seconds=60)
    assert slurm_client.timeout(["sbatch", "--parsable", "job.sh"]) == timedelta(seconds=180)
    assert slurm_client.timeout(["sbatch", "--test-only", "job.sh"]) == timedelta(seconds=30)
    with pytest.raises(KeyError, match=r"slurm_client\.TIMEOUTS has no entry for sprio"):
        slurm_client.timeout(["sprio"])


def test_variables_that_change_the_output_are_dropped(here: Path) -> None:
    """A command sees neither the user's preferences nor another cluster; only sbatch keeps the user's locale."""
    stand_in(here, "squeue", "env")
    stand_in(here, "sbatch", "env")
    dropped = {"SQUEUE_FORMAT": "%P", "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "b", "SACCT_FORMAT": "x"}
    env = {**ENVIRONMENT, **dropped, "PATH": os.environ["PATH"], "LC_ALL": "de_DE.UTF-8"}
    seen = dict(line.partition("=")[::2] for line in slurm_client.run(["squeue"], env).stdout.splitlines())
    assert ENVIRONMENT.items() <= seen.items() and not seen.keys() & dropped.keys()
    assert seen["LC_ALL"] == "C.UTF-8"
    assert "LC_ALL=de_DE.UTF-8\n" in slurm_client.run(["sbatch"], env).stdout


def test_bytes_that_are_not_text(here: Path) -> None:
    """A byte that is not UTF-8 becomes U+FFFD, in stdout and stderr, whatever the locale of this process."""
    stand_in(here, "sinfo", r"printf 'a\377b'; printf 'c\377d' >&2; exit 3")
    output = slurm_client.run(["sinfo"])
    assert (output.status, output.stdout, output.stderr, output.error) == (3, "a\ufffdb", "c\ufffdd", "c\ufffdd")


def test_a_command_that_hangs_is_killed_with_its_children(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the timeout nothing of it runs, not even the child of a site's wrapper, which has the pipe open."""
    stand_in(here, "squeue", f"sleep 600 & echo $! > {here}/child; wait")
    monkeypatch.setitem(slurm_client.TIMEOUTS, "squeue", timedelta(seconds=1))
    started = time.monotonic()
    with pytest.raises(slurm_client.TimedOut, match=r"^`squeue` did not answer in 1 s$"):
        slurm_client.run(["squeue", "--me"])
    assert time.monotonic() - started < 10
    child = int((here / "child").read_text())
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_caller_may_wait_for_less(here: Path) -> None:
    """A caller with a deadline can shorten the timeout, but not extend it."""
    stand_in(here, "squeue", "exec sleep 600")
    with pytest.raises(slurm_client.TimedOut, match=r"in 0\.2 s"):
        slurm_client.run(["squeue"], at_most=timedelta(seconds=0.2))


def test_a_command_that_cannot_be_started(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error states whether the command is missing or cannot be run."""
    stand_in(here, "sinfo", "true")
    (here / "sinfo").write_text("no program")
    monkeypatch.setenv("PATH", str(here))
    for name, message, missing in (("squeue", "squeue is not on PATH", True), ("sinfo", "cannot run sinfo: ", False)):
        with pytest.raises(slurm_client.NotStarted, match=f"^{message}") as raised:
            slurm_client.run([name])
        assert raised.value.missing is missing


SLOW_START = """
import subprocess, time
execute = subprocess.Popen._execute_child
subprocess.Popen._execute_child = lambda *values: (execute(*values), time.sleep(5))
"""


@pytest.mark.parametrize("before", ["", SLOW_START], ids=["while it runs", "while it starts"])
def test_ctrl_c_ends_the_command_too(here: Path, before: str) -> None:
    """A Ctrl-C that reaches the caller alone leaves no squeue behind, and ends the caller."""
    stand_in(here, "squeue", f"echo $$ > {here}/pid; exec sleep 600")
    code = f"{before}\nfrom hpcinit.slurm import slurm_client; slurm_client.run(['squeue'])"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (here / "pid").exists() or not (here / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == -signal.SIGINT
    until(lambda: not _runs(int((here / "pid").read_text())), 30)


def test_verbose_prints_commands_and_durations(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """-v prints each command when it starts, and its duration when it ends; without -v nothing is printed."""
    stand_in(here, "squeue", "sleep 0.2; exit 4")
    slurm_client.run(["squeue", "--me"])
    assert capfd.readouterr().err == ""
    console.set_verbosity(console.VERBOSE)
    try:
        slurm_client.run(["squeue", "--me"])
    finally:
        console.set_verbosity(console.PLAIN)
    first, second = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"hpcinit: \[\d+\.\d\d s\] squeue --me", first)
    took = re.fullmatch(r"hpcinit: \[\d+\.\d\d s\] squeue took (\d+\.\d\d) s, exit status 4", second)
    assert took and float(took[1]) >= 0.2


def test_a_job_of_scontrol(here: Path) -> None:
    """A job's name cannot set its state, and a free text ends with its line. The text is as Slurm 22.05 prints it."""
    text = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=2 JobName=x JobState=FAILED\n"
        "   UserId=me(1000) GroupId=me(1000) MCS_label=N/A\n"
        "   JobState=PENDING Reason=launch failed requeued held Dependency=(null)\n"
        "   RunTime=00:00:01 TimeLimit=00:10:00 TimeMin=N/A ExitCode=3:0\n"
        "   Command=/runs/a b/job.sh JobState=FAILED\n"
        "   Comment=mine hpcinit=x-1 Reason=no\n\n"
    )
    [record] = scontrol.records(text, "JobId")
    assert (record["JobName"], record["TimeLimit"]) == ("x JobState=FAILED", "00:10:00")
    (here / "text").write_text(text)
    stand_in(here, "scontrol", f"cat {here}/text")
    [job] = queue.show(["7_2"])
    assert (job.job_id, job.base_id, job.state, job.source) == ("7_2", "7", "PENDING", "scontrol")
    assert (job.reason, job.exit_status) == ("launch failed requeued held", None)
    assert (job.command, job.comment) == ("/runs/a b/job.sh JobState=FAILED", "mine hpcinit=x-1 Reason=no")
