"""Run the README's commands as written, and compare its output with the real output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.generate import pages
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.test_replayed_pages import fits

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SHELL = re.compile(r"(?:hpcinit|python|make|sbatch|pip|eval|\.) ")
# Commands that other tests run.
ELSEWHERE = {
    "pip install .",  # tests/test_wheel.py: installed in a folder without the checkout
    "make demo",  # the same submission as in test_train_gpt.py
    "make test",  # .ci/run
    "make gpu",  # tests/test_gpu_suite.py, as far as possible without a GPU
    "make docs",  # tests/docs/test_site.py: mkdocs build --strict
    "hpcinit drill -- train.py",  # tests/drill/test_drill.py
    "make cluster",  # test_minislurm.py: `python -m tests.minislurm up`
}
MENTIONED = {"hpcinit why", "hpcinit status", "hpcinit plan", "sbatch --test-only"}  # not whole commands
FROM_GIT = "pip install 'git+https://HOST/PATH'"
MOST_LINES = 130


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(block: str) -> list[str]:
    return [re.split(" +# ", line)[0].strip() for line in block.splitlines()]


CONSOLE = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", blocks("console")[0], re.MULTILINE)
FIRST_JOB = commands(blocks("bash")[0])


def test_every_command_of_the_readme_has_a_test() -> None:
    """Each command, in a block or in a line of text, is run by a test that is named in this file."""
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    shown = [*FIRST_JOB, *(command for command, _ in CONSOLE)]
    shown += [re.split(" +# ", line)[0].strip() for line in re.findall(r"^    (.*)$", text, re.MULTILINE)]
    shown += [line for line in re.findall(r"`([^`]+)`", text) if SHELL.match(line) and line not in MENTIONED]
    assert set(shown) == {*FIRST_JOB, *(command for command, _ in CONSOLE), FROM_GIT, *ELSEWHERE}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.slurm
def test_the_output_of_the_readme_is_real(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The submission and `hpcinit why` print what the README shows, except numbers.

    How many of the other ranks report the closed connection before Slurm ends them differs from run to run.
    """
    (tmp_path / "train.py").write_text((ROOT / "tests/data/readme_train.py").read_text())
    (submit, submitted), (why, explained) = CONSOLE
    done = shell(submit, tmp_path, **idle_slurm.env)
    assert fits(submitted.splitlines(), done.stdout, str(tmp_path)), done.stdout + done.stderr
    shell("hpcinit watch train-0001", tmp_path, **idle_slurm.env)
    done = shell(why, tmp_path, **idle_slurm.env)
    lines = explained.splitlines()
    others = [line for line in lines if line.startswith("  ") and "raised at" not in line]
    expected = [line for line in lines if line not in others]
    expected.insert(lines.index(others[0]), "...")
    assert len(others) == 2 and fits(expected, done.stdout, str(tmp_path)), done.stdout + done.stderr


@pytest.mark.slurm
def test_the_first_job_in_four_commands(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The commands of 'Your first job' work as written; the partition is down, so that 16 ranks do not start."""
    (tmp_path / "train.py").write_text("print()\n")
    idle_slurm.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        for line in FIRST_JOB:
            done = shell(line, tmp_path, EDITOR="cat", **idle_slurm.env)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            if "dry_run=true" in line:
                assert done.stdout.startswith("#!/bin/bash") and not (tmp_path / "runs").exists()
    finally:
        idle_slurm.cancel_all()
        idle_slurm.run("scontrol", "update", "PartitionName=main", "State=UP")
    runs = shell("hpcinit status", tmp_path, **idle_slurm.env).stdout
    assert len(FIRST_JOB) == 4 and "train-0001" in runs


def test_pip_installs_from_a_git_address(tmp_path: Path) -> None:
    """pip builds the package from a git address, without a checkout."""
    if not (ROOT / ".git").exists():
        skip_or_fail("this copy has no .git")
    line = FROM_GIT.replace("pip install", "python -m pip wheel --no-deps --no-build-isolation --wheel-dir .")
    done = shell(line.replace("https://HOST/PATH", f"file://{ROOT}"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*.whl")] == ["hpcinit"]


@pytest.mark.parametrize("options", re.findall(r"\| `([^`|]*=[^`|]*)` \|$", README, re.MULTILINE))
def test_the_options_beside_an_sbatch_script_are_accepted(options: str, tmp_path: Path) -> None:
    """Each replacement for a line of an sbatch script renders a script."""
    (tmp_path / "train.py").write_text("print()\n")
    job = "" if " -- " in options else "job=smoke"
    done = shell(f"hpcinit submit cluster=mini dry_run=true {job} {options}", tmp_path)
    assert done.returncode == 0 and "#SBATCH" in done.stdout, done.stderr


def shell(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        line, shell=True, cwd=folder, env=os.environ | {"PATH": path, "HOME": str(folder)} | env,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_make_targets_of_the_readme_exist() -> None:
    """The make commands in the README are targets, and CI runs the README's test command."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    """Every relative link in README and docs is a file that exists."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        made = (page.parent / target).resolve().relative_to(ROOT).as_posix().removeprefix("docs/") in pages.MADE
        assert made or (page.parent / target).exists(), target
