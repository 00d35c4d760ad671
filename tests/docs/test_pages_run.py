"""Each command of the pages runs as it is written, on a real Slurm of virtual nodes.

Submissions go to a partition that is down: sbatch accepts them, and no rank starts. A comment on the page marks a command
that needs another place, for example `# needs a GPU` or `# on Leonardo`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.page_commands import COMMAND, MARK, PAGES, ROOT, commands, write_files
from tests.minislurm import MiniSlurm
from tests.minislurm.cluster import sweep
from tests.minislurm.plugin import require_slurm
from tests.waiting import until

# Other tests run these. The name of a page means all its commands, and a command all those that start with it.
ELSEWHERE = {
    "README.md": "tests/test_readme.py::test_every_command_of_the_readme_has_a_test",
    "docs/uninstall.md": "tests/test_uninstall.py::test_the_page_is_complete",
    "pip install .": "tests/test_readme.py::test_every_command_of_the_readme_has_a_test",
    "hpcinit submit cluster=mycluster nodes=1 ranks_per_node=1 wait=true -- hpcinit drill": (
        "tests/drill/test_drill.py::test_a_drill_as_a_small_job"
    ),
    "hpcinit shell train-0001 --rank 37": "tests/submit/test_exec.py::test_a_command_beside_a_rank",
    "hpcinit submit -m hydra/sweeper=optuna": "tests/submit/test_search.py::test_on_slurm",
    "python train.py -m hydra/launcher=hpcinit": "tests/test_hydra_launcher.py::test_a_sweep_of_six_two_at_a_time",
    "python app.py -m hydra/launcher=hpcinit": "tests/test_recipes.py::test_a_hydra_application",
}
SLOW = ("docs/clusters.md", "docs/environments.md", "docs/nodes.md")  # the doctor's jobs
TYPED = {"python -m pdb": "continue\nquit\n", "cat >": "a-token\n"}  # what the user types into a command
FOLDERS = {"/project/me": "project", "/shared/me": "shared", "/path/of/the/environment/of/the/job": "shared/venv"}
# Jobs on four nodes run. Jobs of the other partitions don't: these are down, and most of their nodes don't exist.
MORE_NODES = """
NodeName=n[5-64] NodeAddr=127.0.0.1 CPUs=16 RealMemory=4000 Gres=gpu:8 State=DOWN
PartitionName=gpu Nodes=ALL State=DOWN
PartitionName=cpu Nodes=ALL State=DOWN
"""
CLUSTER = "name: mycluster\npartition: {}\ngpus_per_node: {}\ncpus_per_node: 16\ncontainer: {{runtime: {}}}\n"
DOWN, UP = CLUSTER.format("gpu", 8, "pyxis"), CLUSTER.format("main", 0, "null")


def run_here(name: str) -> list[str]:
    """Return the page's commands without those of ELSEWHERE, and without those of other places except submissions."""
    lines = [] if name in ELSEWHERE else commands(name, PAGES[name])
    lines = [line for line in lines if line.startswith("hpcinit submit ") or not MARK.search(line)]
    return [line for line in lines if not f"{line} ".startswith(tuple(f"{start} " for start in ELSEWHERE))]


class User(NamedTuple):
    """The user's folder, and the variables of the user's shell."""

    folder: Path
    env: dict[str, str]

    def type(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run the line in bash. Variables that it sets are set in the next line, as in a terminal."""
        kept = shlex.quote(str(self.folder / ".variables"))
        script = f"set -a; [ ! -f {kept} ] || . {kept}\n{line}\nstatus=$?; export -p > {kept}; exit $status"
        typed = next((text for part, text in TYPED.items() if part in line), "")
        return subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.env, input=typed,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def write_cluster(self, line: str) -> None:
        """Write the cluster file for a command. `hpcinit discover` writes it, and the doctor's jobs must run."""
        file = self.folder / "conf/cluster/mycluster.yaml"
        file.unlink(missing_ok=True)
        if not line.startswith("hpcinit discover "):
            file.write_text(UP if line.startswith("hpcinit doctor") else DOWN)


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    """Yield a cluster of 64 nodes, of which four run. Job 123 has ended, and the next job has the number 4242."""
    require_slurm()
    sweep()
    options = {"FirstJobId": "123", "MinJobAge": "3600"}
    with MiniSlurm(nodes=4, gpus=8, name=f"pages-{os.getpid()}", options=options) as slurm:
        slurm.run("sbatch", "--wait", "--output=/dev/null", "--wrap", "true")
        text = slurm.conf.read_text().replace("FirstJobId=123", "FirstJobId=4242")
        slurm.stop_controller()
        slurm.conf.write_text(
            text.replace("PartitionName=main Nodes=ALL", "PartitionName=main Nodes=n[1-4]") + MORE_NODES
        )
        slurm.start_controller()
        slurm.wait_idle()
        yield slurm


@pytest.fixture(scope="module")
def prepared(cluster: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> User:
    """Return a user with two finished runs, a sweep and a hang. The folder `saved` beside the user's is a copy."""
    folder = tmp_path_factory.mktemp("pages") / "user"
    env = {name: value for name, value in os.environ.items() if name != "HPCINIT_CLUSTER"} | cluster.env
    env |= {"HOME": str(folder), "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    env |= {"MY_RANK": "0", "MY_SIZE": "1", "MY_LOCAL_RANK": "0", "MY_HOST": "localhost"}  # docs/recipes.md
    write_files(folder)
    user = User(folder, env)
    user.write_cluster("hpcinit doctor")
    for line in (
        "git init --quiet && git add train.py && git -c user.name=me -c user.email=me@localhost commit --quiet -m first",
        "sbatch --array=0-7 --output=/dev/null --wrap true",
        "hpcinit submit cluster=mycluster -- train.py && hpcinit watch train-0001",
        "hpcinit submit cluster=mycluster -- train.py && hpcinit watch train-0002",
        "hpcinit submit -m cluster=mycluster name=sweep seed=1,2 -- train.py && hpcinit watch sweep-0001",
    ):
        done = user.type(line)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    shutil.copytree(folder, folder.with_name("saved"), symlinks=True)
    return user


def start_a_run(user: User) -> None:
    """Start train-0001 on two nodes, instead of the finished runs of this name."""
    runs = user.folder / "runs"
    for path in (*runs.glob("train-*"), *runs.glob(".train-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    user.write_cluster("hpcinit doctor")
    done = user.type("hpcinit submit cluster=mycluster nodes=2 name=train -- sleep.py")
    assert done.returncode == 0, done.stderr
    logs = [runs / f"train-0001/logs/rank-{rank}.log" for rank in (0, 1)]
    until(lambda: all(log.exists() and "sleeps" in log.read_text() for log in logs))


def as_typed(line: str, allocation: str, folder: Path) -> str:
    """Return the line with folders that exist here, and within the page's allocation. Elsewhere nothing is submitted."""
    for theirs, ours in FOLDERS.items():
        line = line.replace(theirs, str(folder / ours))
    if MARK.search(line):
        return line.replace("submit", "submit dry_run=true check_paths=false", 1)
    if line == allocation:
        return f"{line} true"
    return f"{allocation} bash -c {shlex.quote(line)}" if allocation and line.startswith("srun ") else line


@pytest.mark.slurm
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.more] * (name in SLOW)) for name in PAGES if run_here(name)]
)
def test_the_commands_of_a_page_work(name: str, cluster: MiniSlurm, prepared: User) -> None:
    """Each command exits with 0, or with the exit status in its comment."""
    folder, lines, failed = prepared.folder, run_here(name), []
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("saved"), folder, symlinks=True)
    if any(line.startswith(("hpcinit stacks ", "hpcinit exec ")) for line in lines):
        start_a_run(prepared)
    allocation = next((line for line in lines if line.startswith("salloc ")), "")
    for line in lines:
        prepared.write_cluster(line)
        done = prepared.type(as_typed(line, allocation, folder))
        if done.returncode not in {0, *map(int, re.findall(r" # .*exit status (\d)", line))}:
            failed.append(f"{line}\n{done.stdout}{done.stderr}")
        # hpcinit would refuse the same command on the same page, as a duplicate.
        cluster.run("scancel", "--quiet", "--user=root", "--state=PENDING")
    cluster.cancel_all()
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("start", "test"), ELSEWHERE.items())
def test_the_other_test_exists(start: str, test: str) -> None:
    """The test exists, and its file contains the command or names each page that has it."""
    file, _, function = test.partition("::")
    text = (ROOT / file).read_text()
    pages = [
        name
        for name in PAGES
        if start == name or any(f"{line} ".startswith(f"{start} ") for line in commands(name, PAGES[name]))
    ]
    assert f"\ndef {function}(" in text and pages
    assert start in text or all(Path(page).name in text for page in pages), pages


def test_commands_are_told_from_output() -> None:
    """Commands have a program first, after variables and folders. A mark is the end of a comment."""
    page = "    $ hpcinit status  # all\n    hpcinit: error: x\n    A=1 venv/bin/pip install \\\n        x\n    a = b\n"
    assert commands("x.md", page) == ["hpcinit status  # all", "A=1 venv/bin/pip install x"]
    assert commands("x.md", "```python\nexport a\n```\n```bash\nexport b\n```\n") == ["export b"]
    assert MARK.search("x  # a file; needs a GPU") and MARK.search("x  # on Leonardo")
    assert not MARK.search("x  # on two nodes")


def test_each_line_of_a_bash_block_is_a_command() -> None:
    """A page does not use a program that PROGRAMS lacks, whose commands no test would run."""
    blocks = re.findall(r"^```bash\n(?!#!)(.*?)^```", "".join(PAGES.values()), re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n +", "", "".join(blocks)).splitlines()
    assert lines and [line for line in lines if not COMMAND.match(line)] == []
