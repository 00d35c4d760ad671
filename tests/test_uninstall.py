"""docs/uninstall.md lists what hpcinit writes, and what removes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import other_user
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail

PAGE = (Path(__file__).parent.parent / "docs/uninstall.md").read_text()
PLACES = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
COMMANDS = re.findall(r"^    (.*?)(?:  +# .*)?$", PAGE, re.MULTILINE)


def left(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if not path.is_dir()}


def test_one_command_removes_what_hpcinit_wrote() -> None:
    """The first command removes all that hpcinit wrote for a user, except the numbers of runs and the user's own files.

    The last commands remove the numbers of runs.

    It runs as another user, because it also removes that user's folder in /tmp.
    """
    if os.geteuid():
        skip_or_fail("only root can run a command as another user")
    with other_user.without_entry(51_300 + os.getpid() % 1000) as user:
        (user.home / "train.py").write_text("print()\n")
        env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TMPDIR": "/tmp"}

        def shell(line: str) -> str:
            done = user.run("sh", "-c", line, env=env)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            return done.stdout

        shell("hpcinit submit cluster=local ranks_per_node=1 wait=true -- train.py")
        shell("hpcinit nodes --cluster local --add n3 --why slow")
        on_disk = Path(f"/tmp/hpcinit-{user.uid}")
        kernels = on_disk / f"kernels-{os.uname().nodename}"
        kernels.mkdir(exist_ok=True)
        os.chown(kernels, user.uid, user.gid)
        assert len(left(user.home)) > 5
        shell(COMMANDS[0])
        assert left(user.home) == {user.home / "train.py", user.home / "runs/.train-0001.number"}
        for line in COMMANDS[4:]:
            shell(line)
        assert left(user.home) == {user.home / "train.py"}
        assert list(on_disk.iterdir()) == []
        on_disk.rmdir()


@pytest.mark.slurm
def test_the_command_for_the_nodes(idle_slurm: MiniSlurm) -> None:
    """It prints the folders of each node. Here it only lists: other tests use the same folders."""
    line = COMMANDS[2].replace("--yes", "--json")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        line, shell=True, env=os.environ | idle_slurm.env | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and line.startswith("srun -N2 "), done.stderr


def test_the_page_is_complete() -> None:
    """The commands are in the order in which they work, and the table has the files beside the run folders."""
    first_words = [line.partition(" -")[0] for line in COMMANDS]
    assert first_words == ["hpcinit clean", "sacct", "srun", "pip uninstall hpcinit", "rm", "rm"]
    assert COMMANDS[0] == "hpcinit clean --all --yes" and "./runs/.NAME-0001.number" in PLACES
