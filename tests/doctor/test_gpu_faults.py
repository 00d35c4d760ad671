"""Faults of GPUs from a FAKE nvidia-smi and dmesg, whose values are from public outputs: tests/data/gpu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcinit.node import node_findings, nvidia_smi
from hpcinit.records.check_results import OK, Check
from hpcinit.records.node_facts import Node
from tests import fake_gpu
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit

NAMES = sorted(path.stem for path in fake_gpu.DATA.glob("*.yaml"))


def found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Check]:
    """Return what hpcinit reports about a node where the FAKE commands print the case `name`."""
    case = fake_gpu.read(name)
    monkeypatch.setenv("PATH", fake_gpu.install(tmp_path / "fake", case))
    gpus, error = nvidia_smi.query()
    assert error or len(gpus) == len(case["gpus"])
    assigned = tuple(map(str, range(case.get("assigned", len(case["gpus"]) or 1))))
    node = Node(gpus=gpus, gpu_error=error, assigned=assigned, xids=nvidia_smi.xids())
    checks = node_findings.node_findings(node, (), (), case.get("ranks", 8))
    return [check for check in checks if check.status != OK]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("fault-")])
def test_a_fault_is_named_with_advice(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each recorded fault of a GPU is named once, with what to do."""
    [check] = found(name, monkeypatch, tmp_path)
    about, status, detail, advice = fake_gpu.read(name)["expected"]
    assert (check.about, check.status) == (about, status)
    assert detail in check.detail and advice in check.advice, check


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sound-")])
def test_no_alarm_on_a_sound_gpu(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The output of a sound GPU is no alarm: idle, with a power cap, with MIG, with values that are not reported."""
    assert found(name, monkeypatch, tmp_path) == []


def test_an_old_xid_is_no_alarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An Xid of more than a day ago is not reported: the GPU may have been reset since."""
    monkeypatch.setenv("PATH", fake_gpu.install(tmp_path / "fake", fake_gpu.read("fault-xid-79")))
    [xid] = nvidia_smi.xids()
    gpus, _ = nvidia_smi.query()
    node = Node(gpus=gpus, assigned=("0",), xids=(replace(xid, age_s=90_000),))
    assert list(node_findings.node_findings(node, (), (), 8)) == []


GPU = ("ranks_per_node=1", "gpus_per_node=1", "check_node.timeout_s=150")


@pytest.mark.slurm
@pytest.mark.timeout(900)
def test_the_check_reports_and_replaces_a_lost_gpu(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """With a FAKE nvidia-smi on n1: by default a lost GPU is only reported; with action=replace the ranks exit."""
    path = fake_gpu.install(tmp_path / "fake", fake_gpu.read("fault-lost"), node="n1")
    words = (*GPU, "nodes=2", f"+job.env.PATH={path}", "+cluster.sbatch.nodelist='n1,n2'", "wait=true")
    done = submit(hpcinit, idle_slurm, *words, "--", "echo", "started", timeout=300)
    text = "".join(log.read_text() for log in sorted((folder_of(done) / "logs").glob("rank-*.log")))
    assert done.returncode == 0 and text.count("started") == 2, done.stderr + text
    lost = "nvidia-smi fails: Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost."
    assert text.count(f"hpcinit: n1: {lost}") == 1 and "hpcinit: n2:" not in text, text
    replace_it = (*words, "check_node.action=replace", "--", "echo", "started")
    done = submit(hpcinit, idle_slurm, *replace_it, timeout=300)
    assert done.returncode != 0
    why = hpcinit("why", folder_of(done).name, env=idle_slurm.env).stdout
    assert f"n1 cannot be used: {lost}" in why, why


@pytest.mark.slurm
@pytest.mark.timeout(1200)
def test_the_doctor_excludes_a_node_with_ecc_errors(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """With a FAKE nvidia-smi on n2: the doctor names the GPU with ECC errors, and --remember excludes its node."""
    path = fake_gpu.install(tmp_path / "fake", fake_gpu.read("fault-ecc"), node="n2")
    words = ("doctor", "cluster=mini", "nodes=2", *GPU, f"+job.env.PATH={path}", "--remember", "-q")
    done = hpcinit(*words, env=idle_slurm.env, timeout=900)
    failed = [line for line in done.stdout.splitlines() if line.startswith("fail ")]
    assert done.returncode == 1 and len(failed) == 1, done.stdout + done.stderr
    assert failed[0].startswith("fail     devices' health: n2: GPU-v100s had 1 uncorrected ECC errors since its driver")
    next_one = hpcinit("submit", "cluster=mini", "nodes=2", "dry_run=true", env=idle_slurm.env)
    assert "#SBATCH --exclude=n2\n" in next_one.stdout and "excluded: n2 (found by hpcinit doctor" in next_one.stderr
    assert hpcinit("nodes", "--forget", "n2").returncode == 0
