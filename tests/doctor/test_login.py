"""hpcinit doctor on the login node."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hpcinit.config.compose import compose
from hpcinit.doctor import check_results, login_checks
from hpcinit.doctor.check_results import FAIL, OK, WARNING, Check
from hpcinit.slurm import slurm_client
from tests.conftest import Run
from tests.minislurm import MiniSlurm


def by_name(text: str) -> dict[str, dict[str, Any]]:
    document = json.loads(text)
    assert document["grade"] in check_results.STATUSES
    return {check["about"]: check for check in document["checks"]}


@pytest.mark.slurm
def test_all_is_well(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """On a healthy cluster each check is ok, the exit status 0, and no folder or file is left behind."""
    done = hpcinit("doctor", "cluster=mini", "--json", env=slurm.env)
    found = by_name(done.stdout)
    assert (done.returncode, done.stderr) == (0, "") and {check["grade"] for check in found.values()} == {OK}
    assert slurm.version() in found["Slurm's controller"]["said"]
    assert found["controller's clock"]["said"] == found["file server's clock"]["said"] == "no difference"
    assert found["partition main"]["said"].startswith("4 nodes: ")
    assert not list(tmp_path.rglob(".hpcinit-*")) and not (tmp_path / "runs").exists()


@pytest.mark.slurm
def test_what_is_bad_is_bad(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Too many nodes, an unknown partition, all problems of a config at once, a runs_dir that takes nothing, and what
    is not passed on: each with what to do, as plain lines, and exit status 1."""
    (tmp_path / "file").write_text("")
    env = slurm.env | {"SBATCH_ACCOUNT": "me", "HF_TOKEN": "hf_" + "a" * 30, "SLURM_JOB_ID": "7"}
    done = hpcinit("doctor", "-q", "cluster=mini", "nodes=9", "time_min=0", "+cluster.sbatch.export=ALL", env=env)
    assert done.returncode == 1 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert "bad      partition main: 4 nodes: 4 idle; usable: 4, asked for: 9 -> fewer nodes=..., or wait" in lines
    assert sum(line.startswith("bad      config: ") for line in lines) >= 2, done.stdout
    assert (
        "warning  this shell: is inside of job 7 -> nothing, if that is meant; else submit from a login shell" in lines
    )
    assert any("SBATCH_ACCOUNT, SLURM_JOB_ID -> meant for the job? account=me" in line for line in lines)
    assert any(line.startswith("warning  secrets: HF_TOKEN looks like a secret") for line in lines)
    assert not any(line.startswith("ok ") for line in lines) and " bad" in lines[-1]
    done = hpcinit("doctor", "cluster=mini", "partition=nope", "runs_dir=/proc/x", "--json", env=slurm.env)
    found = by_name(done.stdout)
    assert done.returncode == 1
    assert found["partition nope"]["said"] == "Slurm has no such partition, or none that you may see"
    assert found["runs_dir"]["grade"] == FAIL and "cannot write in /proc: " in found["runs_dir"]["said"]


@pytest.mark.slurm
def test_no_controller(hpcinit: Run, slurm: MiniSlurm) -> None:
    """The controller is away: that is bad and said in Slurm's words, and the checks that need none are made."""
    slurm.stop_controller()
    try:
        done = hpcinit("doctor", "cluster=mini", "--json", env=slurm.env)
    finally:
        slurm.start_controller()
        slurm.wait_idle()
    found = by_name(done.stdout)
    assert done.returncode == 1 and found["Slurm's controller"]["grade"] == FAIL
    assert "`scontrol show config` failed: " in found["Slurm's controller"]["said"]
    assert found["runs_dir"]["grade"] == OK and "partition main" not in found


def test_without_slurm(hpcinit: Run) -> None:
    """cluster=local needs none; another cluster on a machine without its commands is told which are missing."""
    assert by_name(hpcinit("doctor", "--json").stdout)["Slurm"]["grade"] == OK
    done = hpcinit("doctor", "cluster=mini", "--json", env={"PATH": "/nowhere"})
    assert done.returncode == 1 and "sbatch, srun, squeue, scancel" in by_name(done.stdout)["Slurm"]["said"]


def test_a_config_that_cannot_be_used(hpcinit: Run) -> None:
    """Every problem of it is a line, versions are told all the same, and the exit status is 2; so it is for a word
    that is no override."""
    done = hpcinit("doctor", "cluster=nope", "nodes=x")
    assert done.returncode == 2 and done.stdout.count("bad      config: ") == 2 and "ok       torch: " in done.stdout
    done = hpcinit("doctor", "train.py")
    assert done.returncode == 2 and "'train.py' is no override, expected KEY=VALUE" in done.stderr


def test_in_a_terminal(tmp_path: Path) -> None:
    """A terminal gets a table in colour; with NO_COLOR one without."""

    def shown(**env: str) -> str:
        ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "hpcinit", "doctor", f"runs_dir={tmp_path}"]
        clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm", "HOME": str(tmp_path)}
        subprocess.run(words, env=clean | env, stdout=theirs, stdin=theirs, check=True, timeout=120)
        os.close(theirs)
        text = b""
        try:
            while chunk := os.read(ours, 65536):
                text += chunk
        except OSError:  # Linux's end of a terminal
            pass
        os.close(ours)
        return text.decode()

    assert "\x1b[32mok" in shown()
    assert "\x1b[32m" not in shown(NO_COLOR="1")


def test_clocks() -> None:
    """A clock that answered between question and answer may be the same; else it is off by at least the difference."""
    assert str(check_results.clock_skew(100.0, 100.2, 100.1)) == "no difference"
    assert check_results.clock_skew(100.9, 101.0, 100, 101).seconds == 0  # told in whole seconds
    ahead, behind = check_results.clock_skew(100.0, 100.2, 105.2), check_results.clock_skew(100.0, 100.2, 20.0, 21.0)
    assert (str(ahead), ahead.grade) == ("5.0 s ahead", WARNING)
    assert (str(behind), behind.grade) == ("79.0 s behind", FAIL)
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1_800_000_000))
    assert check_results.controllers(f"Configuration data as of {now}\nAccountingStorageType = x\n") == 1_800_000_000
    assert check_results.controllers("") is None


def test_a_slow_or_silent_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that says nothing is given up after a while, and one that cannot be started is told."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setitem(slurm_client.TIMEOUTS, "scontrol", timedelta(seconds=0.2))
    monkeypatch.setattr(login_checks, "COMMANDS", ("scontrol",))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    [found] = login_checks.slurm_checks(compose(["cluster=mini"]), dict(os.environ))
    assert found.grade == FAIL and found.said == "`scontrol show config` did not answer in 0.2 s"
    (tmp_path / "scontrol").write_text("#!/nowhere\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = login_checks.slurm_checks(compose(["cluster=mini"]), dict(os.environ))
    assert found.said == "cannot run scontrol: No such file or directory"


def test_states_of_nodes() -> None:
    """Nodes that are down, drained or do not answer are none that a job can have; a closed partition is bad."""
    config = compose(["cluster=mini", "nodes=3"])
    rows = [["main*", "2", "idle", "up"], ["main*", "1", "idle*", "up"], ["main*", "1", "drained", "up"]]
    found = login_checks._of_partition(config, "p", rows)
    assert (found.grade, found.said) == (
        FAIL,
        "4 nodes: 2 idle, 1 idle*, 1 drained; usable: 2, asked for: 3",
    )
    assert login_checks._of_partition(compose(["nodes=2"]), "p", rows).grade == OK
    closed = login_checks._of_partition(compose([]), "p", [["main*", "2", "idle", "down"]])
    assert closed.grade == FAIL and closed.said == "2 nodes: 2 idle; it is down"


def test_another_version_of_slurm_than_described() -> None:
    config = compose(["cluster=mini", "cluster.slurm=99.1.2"])
    found = login_checks._version(config, "22.05.8")
    assert found.grade == WARNING and found.said == "22.05.8, and cluster.slurm says 99.1.2"


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of this machine alone, one that is full, one that may be on the nodes only."""
    config = compose(["cluster=mini", "runs_dir=/dev/shm", "cluster.scratch=/not/here"])
    found = {check.about: check for check in login_checks.folder_checks(config, {})}
    assert found["runs_dir"].grade == WARNING and "tmpfs, which other machines do not see" in found["runs_dir"].said
    assert found["cluster.scratch"] == Check(
        "cluster.scratch", WARNING, "/not/here is not here", "nothing, if it is on the compute nodes only"
    )
    monkeypatch.setattr(login_checks, "LITTLE_GB", 1e9)
    [room] = [check for check in login_checks.folder_checks(compose([]), {}) if check.about == "HF_HOME"]
    assert room.grade == WARNING and room.do == login_checks.ROOM


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is needed where the ranks run with this Python, and not where they have another."""
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: "2.1.0" if name == "torch" else "")
    found = {check.about: check for check in login_checks.version_checks(compose(["parallel=zero3"]))}
    assert found["torch"].said == "2.1.0, expected 2.10.0 or newer" and found["deepspeed"].grade == FAIL
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: "")
    found = {check.about: check for check in login_checks.version_checks(compose([]))}
    assert found["torch"].grade == FAIL and found["deepspeed"].grade == OK
    for word in ("cluster.venv=/x", "cluster.python=python3", "cluster.modules=[torch]"):
        found = {check.about: check for check in login_checks.version_checks(compose([word]))}
        assert found["torch"].grade == OK and "not installed" in found["torch"].said


@pytest.mark.parametrize(
    ("torch", "deepspeed", "grade"), [("2.14.1+cu130", "0.19.8", OK), ("2.15.0", "0.20.1", WARNING)]
)
def test_a_version_newer_than_tested(
    monkeypatch: pytest.MonkeyPatch, torch: str, deepspeed: str, grade: object
) -> None:
    """The doctor warns of a torch and of a DeepSpeed that is newer than the newest tested one, and names that one."""
    found = {"torch": torch, "deepspeed": deepspeed}
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: found.get(name, ""))
    checks = {check.about: check for check in login_checks.version_checks(compose([])) if check.about in found}
    assert [check.grade for check in checks.values()] == [grade, grade]
    if grade == WARNING:
        assert checks["torch"].said == "2.15.0 is newer than 2.14.1, the newest torch that hpcinit is tested with"
        assert checks["deepspeed"].do == "nothing, if your job works with it; else: pip install 'deepspeed<=0.19.8'"


def test_grades() -> None:
    """The worst counts, and the count names each."""
    checks = [Check("a", OK, ""), Check("b", FAIL, ""), Check("c", WARNING, ""), Check("d", OK, "")]
    assert check_results.worst_status(checks) == FAIL and check_results.worst_status([]) == OK
    assert (
        check_results.count_statuses(checks) == "4 checks: 2 ok, 1 warning, 1 bad"
        and check_results.count_statuses([]) == "no checks"
    )
