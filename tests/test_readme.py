"""The README's commands, run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import pages
from tests import test_completion
from tests.minislurm import MiniSlurm

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


SHELL = re.compile(r"(?:hpcinit|python|make|sbatch|pip|eval|\.) ")
ON_SLURM = [
    "python -m hpcinit.submit cluster=mini nodes=4 -- train.py --lr 3e-4",
    "sbatch --nodes=4 sbatch/ddp.sbatch train.py",
]
# Run by other tests, or by what stands above all tests.
ELSEWHERE = {
    *test_completion.INSTALL.values(),  # in their shells
    "pip install .",  # tests/test_wheel.py: what pip would install, from a folder without the checkout
    ". .venv/bin/activate",  # of Python's own venv, in the folder where the Makefile makes it
    "make demo",  # the same submission as test_train_gpt.py's
    "make test",  # .ci/run
    "hpcinit discover --name NAME",  # tests/discover/test_discover.py
    "make gpu",  # tests/test_gpu_suite.py, as far as it goes without a GPU
    "make docs",  # tests/docs/test_site.py: mkdocs build --strict
    "make cluster",  # test_minislurm.py: `python -m tests.minislurm up`
}


def commands(block: str) -> list[str]:
    return [re.split("  +#", line)[0].strip() for line in block.splitlines()]


def test_no_command_of_the_readme_is_left_out() -> None:
    """Whatever looks like a command, in a block or in a line, is run by a test that is named here."""
    text = re.sub(r"```python.*?```", "", README, flags=re.DOTALL)
    shown = [line for block in blocks("bash") for line in commands(block)]
    shown += [line.strip() for line in re.findall(r"^    (.*)$", text, re.MULTILINE)]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    shown += [line for line in re.findall(r"`([^`]+)`", prose) if SHELL.match(line) and line != "python -m"]
    assert set(shown) == {*commands(blocks("bash")[1]), *ON_SLURM, *ELSEWHERE}


@pytest.mark.slurm
def test_commands_on_a_cluster_are_accepted(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The README's submissions to a cluster are queued as written, by one who has just read it.

    The partition is down, so that 32 ranks do not start; test_main_job.py and test_sbatch.py run them.
    """
    (tmp_path / "train.py").write_text(blocks("python")[0])
    (tmp_path / "sbatch").symlink_to(ROOT / "sbatch")
    idle_slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        for line in ON_SLURM:
            done = shell(line, tmp_path, **idle_slurm.env)
            assert done.returncode == 0, done.stderr
    finally:
        idle_slurm.cancel_all()
        idle_slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
    runs = shell("hpcinit status", tmp_path, **idle_slurm.env).stdout
    assert "train-0001" in runs and "CANCELLED" in runs


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    """Each line under 'Use it' ends with 0, in order, in an empty folder that holds the README's train.py."""
    (tmp_path / "train.py").write_text(blocks("python")[0])
    lines = commands(blocks("bash")[1])
    assert len(lines) == 13 and all(line.startswith("hpcinit ") for line in lines)
    for line in lines:
        done = shell(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if "-- train.py" in line:  # the next lines look at it
            assert shell("hpcinit logs --follow train-0001", tmp_path).returncode == 0
        if line.startswith("hpcinit logs"):
            assert "0: rank 0 of 2 on 127.0.0.1: 2" in done.stdout and "1: rank 1 of 2 on 127.0.0.2: 2" in done.stdout


def shell(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=os.environ | {"PATH": path, "HOME": str(folder)} | env,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_make_targets_of_the_readme_exist() -> None:
    """The make commands that the README names are targets, and CI runs the README's test command."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link in README and docs is a file that exists."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        made = (page.parent / target).resolve().relative_to(ROOT).as_posix().removeprefix("docs/") in pages.MADE
        assert made or (page.parent / target).exists(), target
