"""What other users put into a shared runs_dir neither stops nor misleads a command."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from hpcinit.base import safe_files
from hpcinit.why import node_exclusion
from tests.conftest import Run
from tests.skip_or_fail import skip_or_fail
from tests.submitting import folder_of
from tests.waiting import until

STRANGER = 65534
DEEP = "[" * 200_000


def plant(folder: Path, kind: str, owner: int) -> None:
    """Make a run folder whose submission.json is a trap."""
    folder.mkdir()
    trap = folder / "submission.json"
    if kind == "fifo":
        os.mkfifo(trap)
    elif kind == "endless":
        trap.symlink_to("/dev/zero")
    else:
        trap.write_text(DEEP)
    os.lchown(trap, owner, owner)
    os.chown(folder, owner, owner)


@pytest.mark.parametrize("kind", ["fifo", "endless", "deep"])
@pytest.mark.parametrize("owner", [STRANGER, os.geteuid()])
def test_commands_do_not_read_traps(hpcinit: Run, kind: str, owner: int) -> None:
    """A FIFO, a link to /dev/zero and a deep document in a run folder neither block nor break any command."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: makes files of another user")
    done = hpcinit("submit", "cluster=local", "wait=true", "--", "true")
    mine = folder_of(done)
    mine.parent.chmod(0o1777)
    plant(mine.parent / "z-0001", kind, owner)
    for words in (["status"], ["clean", "--older-than", "0"], ["watch"], ["nodes"], ["why", mine.name]):
        found = hpcinit(*words, timeout=60)
        assert "Traceback" not in found.stderr and "MemoryError" not in found.stderr, (words, found.stderr)
    again = hpcinit("submit", "cluster=local", "again=true", "wait=true", "--", "true", timeout=60)
    assert again.returncode == 0, again.stderr


def test_only_regular_files_of_the_owner_are_read(tmp_path: Path) -> None:
    """A link, a FIFO and a file of another user are refused; a file of the folder's owner is read."""
    own = tmp_path / "own"
    own.write_text("[1]")
    assert safe_files.read_json(own) == [1]
    (tmp_path / "link").symlink_to(own)
    with pytest.raises(OSError) as caught:
        safe_files.read_text(tmp_path / "link")
    assert caught.value.errno == errno.ELOOP
    (tmp_path / "component").mkdir()
    (tmp_path / "component/own").symlink_to("../own")
    assert safe_files.read_json(tmp_path / "component/own") == [1], "as submit makes it for a component"
    if os.geteuid() == 0:
        os.chown(own, STRANGER, STRANGER)
        with pytest.raises(PermissionError, match="not to the owner of its folder"):
            safe_files.read_text(own)
        os.chown(tmp_path, STRANGER, STRANGER)
        assert safe_files.read_text(own) == "[1]"


def test_a_stranger_s_run_excludes_no_node(tmp_path: Path) -> None:
    """A run folder of another user does not decide which nodes these jobs avoid; the same folder of this user does."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: makes files of another user")
    run = tmp_path / "train-0001"
    (run / "logs").mkdir(parents=True)
    (run / "errors").mkdir()
    (run / "errors/rank-0.json").write_text("{}")
    (run / "submission.json").write_text(json.dumps({"engine": "slurm", "cluster": "mini", "job_id": "7"}))
    (run / "logs/job.log").write_text("srun: error: Node failure on n1\n")
    now = time.time()
    assert [failure.host for failure in node_exclusion.look(tmp_path, "mini", now, 24)] == ["n1"]
    os.chown(run, STRANGER, STRANGER)
    assert node_exclusion.look(tmp_path, "mini", now, 24) == []


def test_a_planted_run_cancels_nothing(hpcinit: Run, tmp_path: Path) -> None:
    """A colleague's run folder that names a process of this user is refused, by name and by job id: it is not signaled."""
    if os.geteuid():
        skip_or_fail("only root can give a folder to another user")
    done = hpcinit("submit", "cluster=local", "--", "sh", "-c", "trap '' TERM; until [ -e go ]; do sleep 0.1; done")
    ours = folder_of(done)
    theirs = ours.with_name("theirs-0001")
    shutil.copytree(ours, theirs)
    for path in (theirs.parent, theirs, *theirs.rglob("*")):
        os.lchown(path, STRANGER, STRANGER)
    job = json.loads((ours / "submission.json").read_text())["job_id"]
    for word in ("theirs-0001", job):
        found = hpcinit("cancel", word)
        assert (
            found.returncode == 2
            and f"theirs-0001 belongs to {safe_files.user(STRANGER)}: only its owner can cancel it" in found.stderr
        ), found
    assert "RUNNING" in hpcinit("status", ours.name).stdout
    Path("go").touch()
    until(lambda: "COMPLETED" in hpcinit("status", ours.name).stdout)
