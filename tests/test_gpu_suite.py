"""The suite for GPUs (tests/gpu, `make gpu`), as far as it can be tested without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpu import __main__ as suite
from tests.gpu import check_plan, findings, report
from tests.gpu.checks import CHECKS, Check
from tests.gpu.findings import CPU_LABEL, FAILED, MEASURED, MISSING, NEEDS_GPU, NOT_SHOWN, PASSED, Finding, Findings

ROOT = Path(__file__).parents[1]


def start(python: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the suite with another Python, whose environment contains nothing of this one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    command = [python, "-m", "tests.gpu", *words]
    return subprocess.run(command, cwd=ROOT, env=own | env, capture_output=True, text=True, timeout=240, check=False)


def required(package: str, found: set[str]) -> set[str]:
    """Return a package and its dependencies, by the names of their distributions, without extras."""
    try:
        needs = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:  # for another platform
        return found
    found.add(package)
    for name in (re.split(r"[^\w.-]", need)[0] for need in needs if "extra ==" not in need):
        if name not in found:
            required(name, found)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a Python with torch, numpy and their dependencies: links to the installed ones."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    there = next(folder.glob("lib/python*/site-packages"))
    for package in required("torch", set()) | required("numpy", set()):
        for file in importlib.metadata.files(package) or []:
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (there / top).exists():
                (there / top).symlink_to(Path(str(file.dist.locate_file(top))))
    python = str(folder / "bin/python")
    has = subprocess.run([python, "-c", "import torch, numpy"], capture_output=True, check=False)
    assert has.returncode == 0, has.stderr
    for name in ("hydra", "omegaconf", "packaging", "psutil", "pytest", "rich", "submitit", "yaml", "deepspeed"):
        lacks = subprocess.run([python, "-I", "-c", f"import {name}"], capture_output=True, check=False)
        assert lacks.returncode == 1, f"{name} is in the bare environment"
    return python


@pytest.mark.more
@pytest.mark.unmeasured("it runs in a Python without coverage.py")
def test_the_suite_runs_with_torch_and_numpy_alone(bare: str, tmp_path: Path) -> None:
    """On CPUs, without Hydra, pytest, psutil and DeepSpeed, each line has the label, missing packages are named, and
    nothing that means a device is called passed."""
    done = start(bare, "--cpu", "--only", "barrier,monitoring", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.startswith(f"[{CPU_LABEL}]") for line in done.stdout.splitlines())
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith(("#", "| "))]
    titles = ("| machine |", "| check |", "| claim |")
    assert all(CPU_LABEL in row for row in rows if not row.startswith(titles)), rows
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["run"] == CPU_LABEL and document["machine"]["versions"]["pytest"] == "not installed"
    found = {one["claim"]: one["status"] for check in document["checks"] for one in check["findings"]}
    assert found["the calls take less than 1 % of a step"] == NEEDS_GPU
    assert found["progress and heartbeat were written"] == PASSED


def test_without_a_gpu_it_refuses() -> None:
    """Without a GPU, or without torch, and without the switch it exits with status 2 and the command to type."""
    done = start(sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.startswith("make gpu needs a GPU: torch") and done.stderr.endswith("make gpu CPU=1\n")
    assert "name a Python that has torch: make gpu PYTHON=" in suite._refusal("torch cannot be imported", torch=False)
    done = start(sys.executable, "--only", "init,speed")
    assert done.returncode == 2 and "no check 'speed', expected one of: init, barrier" in done.stderr


def test_a_check_that_hangs_leaves_no_process_and_loses_no_finding(tmp_path: Path) -> None:
    """At its time limit a check and all its processes are stopped; its findings until then are reported."""
    (tmp_path / "logs").mkdir()
    check = Check("monitoring", 1, 0, "stopped in the middle")  # it trains for more than 4 s
    outcome = suite._one(check, 4.0, suite._environment(cpu=True), tmp_path, cpu=True)
    assert outcome.ended == "stopped after its 4 s" and outcome.status == FAILED
    time.sleep(0.2)
    token = f"{os.getpid()}-monitoring".encode()
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if token in _bytes(path)]
    assert left == []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_status_of_a_check() -> None:
    """A check has the status of its most important finding; numbers alone are passed, no finding is not shown."""

    def of(*statuses: str, ended: str = "") -> str:
        return report.Outcome(CHECKS[0], [Finding("c", status) for status in statuses], 1.0, ended).status

    assert of(PASSED, FAILED, MISSING) == FAILED and of(PASSED, ended="crashed") == FAILED
    assert of(PASSED, NEEDS_GPU) == NEEDS_GPU and of(MISSING, NEEDS_GPU) == MISSING
    assert of(PASSED, MEASURED) == PASSED and of(MEASURED) == PASSED and of() == NOT_SHOWN


def test_a_claim_about_a_device_stays_open_on_a_cpu(tmp_path: Path) -> None:
    """On a CPU a claim about a device is neither passed nor failed; on a GPU it counts."""
    cpu, gpu = Findings(tmp_path / "cpu", cpu=True), Findings(tmp_path / "gpu", cpu=False)
    for found in (cpu, gpu):
        found.claim("one", True, device=True)
        found.claim("two", False, device=True)
        found.claim("three", False)
    assert [one.status for one in findings.read(cpu.path)] == [NEEDS_GPU, NEEDS_GPU, FAILED]
    assert [one.status for one in findings.read(gpu.path)] == [PASSED, FAILED, FAILED]
    with cpu.path.open("a") as file:
        file.write('{"claim": "cut of')
    assert len(findings.read(cpu.path)) == 3


def compared(tmp_path: Path, row: check_plan.Row, factor: float) -> str:
    """Return the status for a peak of `factor` times the prediction. MADE UP: no GPU was available."""
    size = check_plan.SIZES[0]
    parts = check_plan.predicted(row, size, 40_000_000)
    peak = factor * check_plan.memory.total(parts, "gpu")
    measured = dict.fromkeys(("always", "pass", "step", "init", "reserved"), peak) | {"parameters": 40_000_000}
    path = tmp_path / f"{row.name}-{factor}"
    check_plan.compare(Findings(path, cpu=False), row, size, measured)
    [found] = findings.read(path)
    return f"{found.status}: {found.claim.rpartition(': ')[2]}"


def test_measured_memory_beside_the_plan(tmp_path: Path) -> None:
    """Within 15 % passes; less passes only as far as the formula's upper bounds explain it; more fails."""
    row = check_plan.ROWS[0]
    assert compared(tmp_path, row, 1.1) == "passed: within 15 %"
    assert compared(tmp_path, row, 0.8) == "passed: below, with a reason"
    assert compared(tmp_path, row, 0.4) == "failed: within 15 % or with a reason"
    assert compared(tmp_path, row, 1.3) == "failed: within 15 % or with a reason"


def missing_from(text: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if f"`{name}`" not in text]


def test_every_check_is_in_the_documentation() -> None:
    """docs/development/gpu.md names each check, and each has a module."""
    text = (ROOT / "docs/development/gpu.md").read_text()
    assert missing_from(text, [check.name for check in CHECKS]) == []
    assert all(importlib.util.find_spec(check.module) for check in CHECKS)
