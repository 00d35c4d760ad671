"""Which Slurm step started this process, from files instead of the real /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcinit.world.launchers.slurm_step import Process, slurm_step_of_this_process


def proc(folder: Path, cgroup: str = "0::/\n", title: str = "bash\0-l\0", grandparent: str = "1") -> Path:
    """Write this process, its parent 4242 (a shell) and its grandparent 4241 with `title`."""
    for pid, parent, line in (
        (str(os.getpid()), "4242", "python\0"),
        ("4242", "4241", "sh\0"),
        ("4241", grandparent, title),
    ):
        (folder / pid).mkdir()
        (folder / pid / "stat").write_text(f"{pid} (a) b (c) S {parent} 1 1 0\n")
        (folder / pid / "cmdline").write_text(line)
    (folder / "self").mkdir()
    (folder / "self/cgroup").write_text(cgroup)
    return folder


@pytest.mark.parametrize(
    ("title", "step"),
    [
        ("slurmstepd: [43.0]     ", "43.0"),
        ("slurmstepd: [43.batch]", "43.batch"),
        ("slurmstepd: [43.interactive]", "43.interactive"),
        ("slurmstepd: [43+1.0]", "43.0"),
        ("vi slurmstepd: [43.0]", ""),
        ("bash", ""),
    ],
)
def test_the_title_of_slurmstepd(title: str, step: str, tmp_path: Path) -> None:
    """The first slurmstepd among the parents names job and step; other titles do not count."""
    assert slurm_step_of_this_process(proc(tmp_path, title=title)) == Process(os.getpid(), step)


@pytest.mark.parametrize(
    ("cgroup", "step"),
    [
        ("0::/system.slice/slurmstepd.scope/job_43/step_0/user/task_1\n", "43.0"),
        ("9:x:/\n4:memory:/slurm/uid_1000/job_43/step_batch/task_0\n", "43.batch"),
        ("0::/user.slice\n", "44.0"),
    ],
)
def test_the_cgroup_is_asked_first(cgroup: str, step: str, tmp_path: Path) -> None:
    """Slurm's cgroups, of either version, name job and step; otherwise the parents do."""
    assert slurm_step_of_this_process(proc(tmp_path, cgroup, "slurmstepd: [44.0]")).step == step


def test_nothing_to_read_is_nothing_known(tmp_path: Path) -> None:
    """Without /proc, and with a cycle of parents, the step is unknown and nothing is raised."""
    assert slurm_step_of_this_process(tmp_path / "absent").step == ""
    assert slurm_step_of_this_process(proc(tmp_path, grandparent="4242")).step == ""


def test_here_is_no_slurm_step() -> None:
    """The real /proc can be read."""
    assert slurm_step_of_this_process().pid == os.getpid()
