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
from hpcinit.doctor import clock_skew, login_checks
from hpcinit.records import check_results
from hpcinit.records.check_results import FAIL, OK, WARNING, Check
from hpcinit.slurm import slurm_client
from tests.conftest import Run
from tests.minislurm import MiniSlurm


def by_name(text: str) -> dict[str, dict[str, Any]]:
    document = json.loads(text)
    assert document["status"] in check_results.STATUSES
    return {check["about"]: check for check in document["checks"]}


@pytest.mark.slurm
def test_a_healthy_cluster(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """On a healthy cluster each check is ok, the exit status 0, and no folder or file is left behind."""
    done = hpcinit("doctor", "cluster=mini", "--json", env=slurm.env)
    found = by_name(done.stdout)
    assert (done.returncode, done.stderr) == (0, "") and {check["status"] for check in found.values()} == {OK}
    assert slurm.version() in found["Slurm's controller"]["detail"]
    assert found["controller's clock"]["detail"] == found["file server's clock"]["detail"] == "no difference"
    assert found["partition main"]["detail"].startswith("4 nodes: ")
    assert not list(tmp_path.rglob(".hpcinit-*")) and not (tmp_path / "runs").exists()


@pytest.mark.slurm
def test_failures_and_warnings(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Too many nodes, an unknown partition, every problem of a config, a read-only runs_dir and a shell inside a job:
    each is a plain line with advice, and the exit status is 1."""
    (tmp_path / "file").write_text("")
    env = slurm.env | {"SLURM_JOB_ID": "7"}
    done = hpcinit("doctor", "-q", "cluster=mini", "nodes=9", "time_min=0", "+cluster.sbatch.export=ALL", env=env)
    assert done.returncode == 1 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert (
        "fail     partition main: 4 nodes: 4 idle; usable: 4, requested: 9 -> request fewer nodes=..., or wait" in lines
    )
    assert sum(line.startswith("fail     config: ") for line in lines) >= 2, done.stdout
    assert (
        "warning  this shell: it runs inside job 7 -> nothing to do if this is intended; otherwise submit from a login shell"
        in lines
    )
    assert not any(line.startswith("ok ") for line in lines) and " fail" in lines[-1]
    done = hpcinit("doctor", "cluster=mini", "partition=nope", "runs_dir=/proc/x", "--json", env=slurm.env)
    found = by_name(done.stdout)
    assert done.returncode == 1
    assert found["partition nope"]["detail"] == "Slurm has no such partition, or you cannot see it"
    assert found["runs_dir"]["status"] == FAIL and "cannot write in /proc: " in found["runs_dir"]["detail"]


@pytest.mark.slurm
def test_no_controller(hpcinit: Run, slurm: MiniSlurm) -> None:
    """Without a controller one check fails with Slurm's message; the checks that need no controller still run."""
    slurm.stop_controller()
    try:
        done = hpcinit("doctor", "cluster=mini", "--json", env=slurm.env)
    finally:
        slurm.start_controller()
        slurm.wait_idle()
    found = by_name(done.stdout)
    assert done.returncode == 1 and found["Slurm's controller"]["status"] == FAIL
    assert "`scontrol show config` failed: " in found["Slurm's controller"]["detail"]
    assert found["runs_dir"]["status"] == OK and "partition main" not in found


def test_without_slurm(hpcinit: Run) -> None:
    """cluster=local needs no Slurm; for another cluster the missing commands are named."""
    assert by_name(hpcinit("doctor", "--json").stdout)["Slurm"]["status"] == OK
    done = hpcinit("doctor", "cluster=mini", "--json", env={"PATH": "/nowhere"})
    assert done.returncode == 1 and "sbatch, srun, squeue, scancel" in by_name(done.stdout)["Slurm"]["detail"]


def test_an_invalid_config(hpcinit: Run) -> None:
    """Every problem of the config is a line, versions are still checked, and the exit status is 2, as for an argument
    that is not an override."""
    done = hpcinit("doctor", "cluster=nope", "nodes=x")
    assert done.returncode == 2 and done.stdout.count("fail     config: ") == 2 and "ok       torch: " in done.stdout
    done = hpcinit("doctor", "train.py")
    assert done.returncode == 2 and "'train.py' is not an override, expected KEY=VALUE" in done.stderr


def test_in_a_terminal(tmp_path: Path) -> None:
    """A terminal gets a table in color, and one without color if NO_COLOR is set."""

    def shown(**env: str) -> str:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "hpcinit", "doctor", f"runs_dir={tmp_path}"]
        clean = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm", "HOME": str(tmp_path)}
        subprocess.run(command, env=clean | env, stdout=theirs, stdin=theirs, check=True, timeout=120)
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
    """A clock that was between the query's start and end may be right; otherwise it is off by at least the difference."""
    assert str(clock_skew.clock_skew(100.0, 100.2, 100.1)) == "no difference"
    assert clock_skew.clock_skew(100.9, 101.0, 100, 101).seconds == 0  # in whole seconds
    ahead, behind = clock_skew.clock_skew(100.0, 100.2, 105.2), clock_skew.clock_skew(100.0, 100.2, 20.0, 21.0)
    assert (str(ahead), ahead.status) == ("5.0 s ahead", WARNING)
    assert (str(behind), behind.status) == ("79.0 s behind", FAIL)
    now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1_800_000_000))
    assert clock_skew.controller_clock(f"Configuration data as of {now}\nAccountingStorageType = x\n") == 1_800_000_000
    assert clock_skew.controller_clock("") is None


def test_a_slow_or_silent_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that does not answer times out, and one that cannot be started is reported."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setitem(slurm_client.TIMEOUTS, "scontrol", timedelta(seconds=0.2))
    monkeypatch.setattr(login_checks, "COMMANDS", ("scontrol",))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    [found] = login_checks.slurm_checks(compose(["cluster=mini"]), dict(os.environ))
    assert found.status == FAIL and found.detail == "`scontrol show config` did not answer in 0.2 s"
    (tmp_path / "scontrol").write_text("#!/nowhere\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    [found] = login_checks.slurm_checks(compose(["cluster=mini"]), dict(os.environ))
    assert found.detail == "cannot run scontrol: No such file or directory"


def test_states_of_nodes() -> None:
    """Nodes that are down, drained or unresponsive are not usable; a closed partition fails."""
    config = compose(["cluster=mini", "nodes=3"])
    rows = [["main*", "2", "idle", "up"], ["main*", "1", "idle*", "up"], ["main*", "1", "drained", "up"]]
    found = login_checks._of_partition(config, "p", rows)
    assert (found.status, found.detail) == (
        FAIL,
        "4 nodes: 2 idle, 1 idle*, 1 drained; usable: 2, requested: 3",
    )
    assert login_checks._of_partition(compose(["nodes=2"]), "p", rows).status == OK
    closed = login_checks._of_partition(compose([]), "p", [["main*", "2", "idle", "down"]])
    assert closed.status == FAIL and closed.detail == "2 nodes: 2 idle; the partition is down"


def test_another_version_of_slurm_than_described() -> None:
    """A version of Slurm that differs from the cluster file's is a warning."""
    config = compose(["cluster=mini", "cluster.slurm=99.1.2"])
    found = login_checks._version(config, "22.05.8")
    assert found.status == WARNING and found.detail == "22.05.8, but cluster.slurm is 99.1.2"


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on a local file system, a full one, and one that does not exist here are warnings."""
    config = compose(["cluster=mini", "runs_dir=/dev/shm", "cluster.scratch=/not/here"])
    found = {check.about: check for check in login_checks.folder_checks(config, {})}
    assert (
        found["runs_dir"].status == WARNING and "on tmpfs, which other machines cannot see" in found["runs_dir"].detail
    )
    assert found["cluster.scratch"] == Check(
        "cluster.scratch",
        WARNING,
        "/not/here does not exist here",
        "nothing to do if it exists on the compute nodes",
    )
    monkeypatch.setattr(login_checks, "LITTLE_GB", 1e9)
    [full] = [check for check in login_checks.folder_checks(compose([]), {}) if check.about == "HF_HOME"]
    assert full.status == WARNING and full.advice == login_checks.FREE_SPACE


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing torch fails if the ranks use this Python, and not if they use another."""
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: "2.1.0" if name == "torch" else "")
    found = {check.about: check for check in login_checks.version_checks(compose(["parallel=zero3"]))}
    assert found["torch"].detail == "2.1.0, expected 2.10.0 or newer" and found["deepspeed"].status == FAIL
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: "")
    found = {check.about: check for check in login_checks.version_checks(compose([]))}
    assert found["torch"].status == FAIL and found["deepspeed"].status == OK
    for override in ("cluster.venv=/x", "cluster.python=python3", "cluster.modules=[torch]"):
        found = {check.about: check for check in login_checks.version_checks(compose([override]))}
        assert found["torch"].status == OK and "not installed" in found["torch"].detail


@pytest.mark.parametrize(
    ("torch", "deepspeed", "status"), [("2.15.0+cu130", "0.19.8", OK), ("2.16.0", "0.20.1", WARNING)]
)
def test_a_version_newer_than_tested(
    monkeypatch: pytest.MonkeyPatch, torch: str, deepspeed: str, status: object
) -> None:
    """A torch or DeepSpeed newer than the newest tested version is a warning that names that version."""
    found = {"torch": torch, "deepspeed": deepspeed}
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: found.get(name, ""))
    checks = {check.about: check for check in login_checks.version_checks(compose([])) if check.about in found}
    assert [check.status for check in checks.values()] == [status, status]
    if status == WARNING:
        assert checks["torch"].detail == "2.16.0 is newer than 2.15.0, the newest torch that hpcinit is tested with"
        assert checks["deepspeed"].advice == (
            "nothing to do if your job works; otherwise: pip install 'deepspeed<=0.19.8'"
        )


def test_a_deepspeed_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DeepSpeed below 0.18.5 fails if the request needs it, and is a warning otherwise. The version is a fake."""
    found = {"torch": "2.13.0", "deepspeed": "0.17.6"}
    monkeypatch.setattr(login_checks.versions, "installed", lambda name: found.get(name, ""))
    for request, status in (([], WARNING), (["comm.deepspeed=true"], FAIL), (["parallel=zero3"], FAIL)):
        checks = {check.about: check for check in login_checks.version_checks(compose(request))}
        assert checks["deepspeed"].status == status
        assert checks["deepspeed"].detail.startswith("DeepSpeed 0.17.6 is installed, expected 0.18.5 or newer")
        assert checks["deepspeed"].advice == "pip install 'deepspeed>=0.18.5,<0.20'"


def test_statuses() -> None:
    """The worst status counts, and the summary counts each status."""
    checks = [Check("a", OK, ""), Check("b", FAIL, ""), Check("c", WARNING, ""), Check("d", OK, "")]
    assert check_results.worst_status(checks) == FAIL and check_results.worst_status([]) == OK
    assert (
        check_results.count_statuses(checks) == "4 checks: 2 ok, 1 warning, 1 fail"
        and check_results.count_statuses([]) == "no checks"
    )
