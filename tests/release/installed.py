"""Install an archive of hpcinit in an empty environment, and use it there as on a login node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14")


def other_pythons() -> list[str]:
    """Return the other supported Pythons of this machine, on PATH or from pyenv."""
    found = []
    for version in SUPPORTED:
        places = [
            shutil.which(f"python{version}"),
            *Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python"),
        ]
        works = (
            str(p)
            for p in places
            if p
            and not subprocess.run([p, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode
        )
        if version != f"{sys.version_info[0]}.{sys.version_info[1]}" and (python := next(works, None)):
            found.append(python)
    return found


def install(archive: Path, python: str, venv: Path, *more: str) -> None:
    """Make `venv` with this Python and install the archive and its dependencies. more: further arguments of pip."""
    subprocess.run([python, "-m", "venv", "--without-pip", venv], check=True, capture_output=True)
    pip = [sys.executable, "-m", "pip", "--python", venv, "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, archive, *more], capture_output=True, text=True, check=False, cwd=venv)
    assert done.returncode == 0, done.stderr


def run(venv: Path, folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment in this folder, without the variables that would show it this checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HPCINIT_CONF")}
    command = [str(venv / "bin" / words[0]), *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=900)


def check_origin(venv: Path, folder: Path) -> None:
    """Check that a program in this folder imports hpcinit from the environment."""
    where = run(venv, folder, ["python", "-c", "import hpcinit; print(hpcinit.__file__)"]).stdout
    assert where.startswith(str(venv)), f"hpcinit is imported from {where.strip()}, expected {venv}"


def check_commands(venv: Path, folder: Path) -> None:
    """Check that without torch, as on a login node, a dry run, a local job and the other commands work."""

    def hpcinit(*words: str) -> subprocess.CompletedProcess[str]:
        return run(venv, folder, ["hpcinit", *words])

    script = hpcinit("submit", "cluster=mini", "nodes=4", "dry_run=true", "check_paths=false")
    assert script.returncode == 0 and script.stdout.startswith("#!/bin/bash"), script.stderr
    job = hpcinit("submit", "cluster=local", "wait=true", "name=wheel", "--", "echo", "some text")
    assert job.returncode == 0 and "some text" in job.stdout, job.stdout + job.stderr
    assert json.loads(hpcinit("status", "--json", "wheel-0001").stdout)["state"] == "COMPLETED"
    for words in (["--help"], ["submit", "--help"], ["plan", "--help"], ["nodes"], ["--version"]):
        done = hpcinit(*words)
        assert done.returncode == 0, (words, done.stderr)
    assert hpcinit("status", "-q").stdout == "wheel-0001 COMPLETED\n"
