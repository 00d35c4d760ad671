"""`hpcinit exec` and `hpcinit shell`: a command beside a rank, with its environment, folder, container and status."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, submit
from tests.waiting import until

SLEEP = "import time; print('up', flush=True); time.sleep(6000)\n"
SHAPE = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]
SHOW = "pwd; env; echo odd >&2; cat; exit 3"
# What srun 22.05 prints if the slurmd of the node does not respond.
NO_LAUNCH = """#!/bin/sh
echo 'srun: error: Task launch for StepId=16.6 failed on node n1: Socket timed out on send/recv operation' >&2
echo 'srun: error: Application launch failed: Socket timed out on send/recv operation' >&2
echo 'srun: Job step aborted' >&2
exit 1
"""


def up(folder: Path, ranks: int) -> None:
    until(lambda: sum("up\n" in log.read_text() for log in (folder / "logs").glob("rank-*.log")) == ranks)


def typed(words: list[str], after: str, line: str, env: dict[str, str]) -> tuple[str, int]:
    """Run hpcinit in a terminal, and type `line` when `after` is on the screen. Return the screen and the status."""
    mine, its = pty.openpty()
    command = [sys.executable, "-m", "hpcinit", *words]
    process = subprocess.Popen(command, env={**os.environ, **env}, stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown, sent = "", False
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:  # EIO: the other end is closed
            break
        shown += piece.decode(errors="replace")
        if after in shown and not sent:
            os.write(mine, line.encode())
            sent = True
    os.close(mine)
    return shown, process.wait(60)


@pytest.mark.slurm
def test_a_command_beside_a_rank(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """The command has the job's environment and folder, but no place in its process group; the run continues.

    docs/stacks.md shows these commands.
    """
    (tmp_path / "train.py").write_text(SLEEP)
    env = idle_slurm.env
    folder = folder_of(submit(hpcinit, idle_slurm, *SHAPE, "+job.env.OF_THE_RUN=7", "--", "train.py"))
    up(folder, 4)
    elsewhere = {**env, "SLURM_JOB_ID": "1", "RANK": "9"}  # as in another job

    done = hpcinit("exec", folder.name, "--rank", "3", "--", "sh", "-c", SHOW, env=elsewhere)
    assert (done.returncode, done.stderr) == (3, "odd\n"), done.stderr
    where, *rest = done.stdout.splitlines()
    seen = dict(line.partition("=")[::2] for line in rest)
    assert where == str(tmp_path)
    assert (seen["OF_THE_RUN"], seen["SLURMD_NODENAME"], seen["SLURM_PROCID"]) == ("7", "n2", "0")
    assert seen["SLURM_JOB_ID"] != "1"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "HPCINIT_RUN"} & seen.keys()
    title = Path(f"/proc/{seen['HPCINIT_RANK_PID']}/cmdline").read_text()
    assert title.startswith("rank 3/4 train.py"), title

    assert hpcinit("exec", folder.name, "--node", "n2", "--", "hostname", env=env).stdout == "n2\n"
    killed = hpcinit("exec", folder.name, "--", "sh", "-c", "kill -9 $$", env=env)
    assert (killed.returncode, killed.stderr) == (137, "")
    none = hpcinit("exec", folder.name, "--", "nonsense", env=env)
    assert none.returncode == 127
    assert none.stderr == "hpcinit: error: cannot run 'nonsense' on n1: No such file or directory\n"
    for words, problem in {
        ("--node", "n9", "--", "true"): "n9 is not a node of job",
        ("--rank", "4", "--", "true"): "rank 4 does not exist: the run has the ranks 0 to 3",
        (): "no command, expected one after --: hpcinit exec RUN -- command args...",
    }.items():
        refused = hpcinit("exec", folder.name, *words, env=env)
        assert refused.returncode == 2 and problem in refused.stderr, refused.stderr

    shown, status = typed(["shell", folder.name, "--rank", "2"], "on n2, beside rank 2 (process ", "tty; exit 5\n", env)
    assert status == 5 and "/dev/pts/" in shown, shown

    fake = tmp_path / "bin/srun"
    fake.parent.mkdir()
    fake.write_text(NO_LAUNCH)
    fake.chmod(0o755)
    path = {**env, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    failed = hpcinit("exec", folder.name, "--", "true", env=path)
    assert failed.returncode == 1
    assert failed.stderr == (
        "hpcinit: error: the command did not start on n1: Task launch for StepId=16.6 failed on node n1: Socket timed out on "
        "send/recv operation; Application launch failed: Socket timed out on send/recv operation. The run continues: "
        f"hpcinit status {folder.name}\n"
    )
    no_stacks = hpcinit("stacks", folder.name, env=path)
    assert no_stacks.returncode == 1 and "no node of job" in no_stacks.stderr, no_stacks.stderr
    assert "RUNNING" in hpcinit("status", folder.name, env=env).stdout


APPTAINER = """#!/bin/sh
echo "called with $*" >&2
while [ "$1" != train.sif ]; do shift; done
shift
exec "$@"
"""


def test_a_command_in_the_image(hpcinit: Run, tmp_path: Path) -> None:
    """With cluster=local and a stand-in for apptainer: the command starts in the image of the ranks, and not after the end."""
    apptainer = tmp_path / "bin/apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(APPTAINER)
    apptainer.chmod(0o755)
    (tmp_path / "train.sif").touch()
    (tmp_path / "train.py").write_text(SLEEP)
    env = {"PATH": f"{apptainer.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = ["cluster.container.runtime=apptainer", "container.image=train.sif", "nodes=1", "ranks_per_node=1"]
    folder = folder_of(hpcinit("submit", "cluster=local", *words, "+job.env.OF_THE_RUN=7", "--", "train.py", env=env))
    try:
        up(folder, 1)
        done = hpcinit("exec", folder.name, "--", "sh", "-c", "echo $OF_THE_RUN; exit 4", env=env)
        assert (done.returncode, done.stdout) == (4, "7\n"), done.stderr
        assert done.stderr.startswith(f"called with exec --pwd={tmp_path} --bind="), done.stderr
    finally:
        hpcinit("cancel", folder.name)
    until(lambda: " has ended (CANCELLED)" in hpcinit("exec", folder.name, "--", "true").stderr)
