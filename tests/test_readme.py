"""The README's commands, run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_command_of_the_readme_runs(tmp_path: Path) -> None:
    """Each line under 'Use it' ends with 0, in order, in an empty folder that holds the README's train.py."""
    (tmp_path / "train.py").write_text(blocks("python")[0])
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    lines = [line.partition("  #")[0].strip() for line in blocks("bash")[1].splitlines()]
    assert len(lines) == 8 and all(line.startswith("hpcinit ") for line in lines)
    for line in lines:
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if "-- train.py" in line:  # the next lines look at it
            subprocess.run(
                "hpcinit logs --follow train-0001", shell=True, cwd=tmp_path, env=env, timeout=100, check=True
            )
        if line.startswith("hpcinit logs"):
            assert "0: rank 0 of 2 on 127.0.0.1: 2" in done.stdout and "1: rank 1 of 2 on 127.0.0.2: 2" in done.stdout


def test_make_targets_of_the_readme_exist() -> None:
    """The make commands that the README names are targets, and CI runs the README's test command."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link in README and docs is a file that exists."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
