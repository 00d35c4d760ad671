"""A real Apptainer runs the ranks of a job on the real Slurm, without privileges: `make test-apptainer`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.newer_debian import visible
from tests.submitting import folder_of, submit
from tests.systems.jobs import PROGRAMS, said

SCRIPT = Path(__file__).parents[2] / "sbatch/container.sbatch"


def image(folder: Path) -> Path:
    """Build an image from a folder with a shell and the system libraries that Python and torch need; return its path."""
    root, shell = folder / "root", "/bin/sh"
    for name in ("dev", "etc", "proc", "root", "sys", "tmp", "var/tmp"):
        (root / name).mkdir(parents=True)
    (root / "etc/made-by-the-test").touch()
    python = Path(sys.executable).resolve()
    binaries = [
        shell,
        python,
        *Path(torch.__file__).parent.glob("lib/*.so"),
        *python.parents[1].glob("lib/python3*/lib-dynload/*.so"),
    ]
    listed = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    libraries = set(re.findall(r"\s(/(?:usr/)?lib(?:64)?/\S+\.so\S*)", listed))
    subprocess.run(["cp", "--parents", "--dereference", shell, *libraries, root], check=True)
    subprocess.run(["apptainer", "build", folder / "train.sif", root], check=True, capture_output=True)
    return folder / "train.sif"


def mounts() -> str:
    """Return this machine's folders that the ranks need, as Apptainer takes them."""
    return ",".join(f"{path}:{path}" for path in visible() if path.is_dir())


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_the_script_without_the_submitter(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """sbatch/container.sbatch finds Apptainer, and starts two ranks on two nodes in one image, which form a group."""
    job = [
        "sbatch",
        "--wait",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--chdir={tmp_path}",
        "--output=job.log",
        str(SCRIPT),
    ]
    set_by_user = {"IMAGE": str(image(tmp_path)), "MOUNTS": mounts(), "PYTHON": sys.executable, "APPTAINER_USERNS": "1"}
    variables = [f"{name}={value}" for name, value in set_by_user.items()]
    try:
        idle_slurm.run("env", *variables, *job, str(PROGRAMS / "in_container.py"), str(tmp_path))
    finally:
        print((tmp_path / "job.log").read_text()[-4000:])
    for rank, each in enumerate(said(tmp_path, 2)):
        assert (each["rank"], each["world"], each["total"], each["marked"]) == (rank, 2, 3.0, True)


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_two_ranks_in_an_image(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Two ranks on two nodes run in one image, in user namespaces, and form a group. The Python is a mount of this machine."""
    words = (
        "nodes=2",
        "ranks_per_node=1",
        "wait=true",
        "cluster.container.runtime=apptainer",
        f"container.image={image(tmp_path)}",
        f"container.python={sys.executable}",
        f"container.mounts=[{mounts()}]",
        "+container.options.userns=true",
    )
    program = (str(PROGRAMS / "in_container.py"), str(tmp_path))
    done = submit(hpcinit, idle_slurm, *words, "--", *program, timeout=500)
    assert done.returncode == 0, (folder_of(done) / "logs/rank-0.log").read_text()[-4000:] + done.stderr
    for rank, each in enumerate(said(tmp_path, 2)):
        assert (each["rank"], each["world"], each["launcher"], each["total"]) == (rank, 2, "slurm", 3.0)
        assert each["image"] == str(tmp_path / "train.sif") and each["marked"]
        assert each["users"] == 1, "a user namespace of one user"
