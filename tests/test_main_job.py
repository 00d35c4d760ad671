"""The main job on a real Slurm with four nodes: compose, render, submit, start, train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcinit.engine import local_step
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_id_of, printed, scripts_of, submit

pytestmark = pytest.mark.slurm


def test_every_rank_knows_its_place(hpcinit: Run, slurm: MiniSlurm) -> None:
    """Ranks 0 to 7 run in pairs on n1 to n4, and MASTER_ADDR is the host of rank 0 for all of them."""
    print_world = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $(uname -n)"'
    done = submit(hpcinit, slurm, "nodes=4", "ranks_per_node=2", "wait=true", "--", "sh", "-c", print_world)
    logs = [printed(folder_of(done), rank).strip() for rank in range(8)]
    assert logs == [f"{rank} 8 {rank % 2} 2 {rank // 2} n1 n{rank // 2 + 1}" for rank in range(8)]


def test_ranks_per_node_is_the_clusters_gpus(hpcinit: Run, slurm: MiniSlurm) -> None:
    """Without ranks_per_node there is one rank per GPU, and each sees all GPUs of its node."""
    done = submit(hpcinit, slurm, "wait=true", "--", "sh", "-c", "echo $WORLD_SIZE $CUDA_VISIBLE_DEVICES")
    assert (folder_of(done) / "logs/rank-7.log").read_text() == "8 0,1,2,3,4,5,6,7\n"


def test_smoke_all_reduces(hpcinit: Run, slurm: MiniSlurm) -> None:
    """The default job initializes the group on three nodes, and its all-reduce is correct."""
    done = submit(hpcinit, slurm, "nodes=3", "ranks_per_node=1", "wait=true")
    assert done.returncode == 0 and "rank 0 of 3: host n1" in done.stdout and "all-reduce 3" in done.stdout


def test_slurm_stores_the_script_of_the_dry_run(hpcinit: Run, slurm: MiniSlurm) -> None:
    """The controller stores byte for byte the script that dry_run prints, which is also in the run folder."""
    words = ["nodes=2", "ranks_per_node=1", "--", "sleep", "30"]
    printed = scripts_of(submit(hpcinit, slurm, "dry_run=true", *words).stdout)
    done = submit(hpcinit, slurm, *words)
    folder = folder_of(done)
    job_id = json.loads((folder / "submission.json").read_text())["job_id"]
    stored = slurm.run("scontrol", "write", "batch_script", job_id, "-")
    assert hpcinit("cancel", folder.name, env=slurm.env).returncode == 0
    assert (folder / "job.sh").read_text() == printed
    assert stored.rstrip("\n") == printed.rstrip("\n")


def test_status_logs_and_cancel(hpcinit: Run, slurm: MiniSlurm) -> None:
    """A running job is shown as running, its output is readable, and cancel ends it."""
    done = submit(hpcinit, slurm, "ranks_per_node=1", "--", "sh", "-c", "echo here; sleep 300")
    folder = folder_of(done)
    deadline = time.monotonic() + 30
    while "here" not in hpcinit("logs", "--all", folder.name, env=slurm.env).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "RUNNING" in hpcinit("status", folder.name, env=slurm.env).stdout
    hpcinit("cancel", folder.name, env=slurm.env)
    while "CANCELLED" not in hpcinit("status", folder.name, env=slurm.env).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_status_of_a_purged_job(hpcinit: Run, slurm: MiniSlurm) -> None:
    """If Slurm has purged a job, and without accounting, its exit record shows how it ended."""
    folder = folder_of(submit(hpcinit, slurm, "ranks_per_node=1", "wait=true", "--", "sh", "-c", "exit 5"))
    for name, key in (("submission.json", "job_id"), ("exit.json", "job")):
        record = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**record, key: "999999"}))
    state = json.loads(hpcinit("status", "--json", folder.name, env=slurm.env).stdout)
    assert (state["state"], state["exit_status"], state["source"]) == ("FAILED", 5, "exit.json")


def test_a_failing_rank_fails_the_job_and_is_named(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """One rank that raises ends the job within seconds, and the report names rank, host and error."""
    (tmp_path / "boom.py").write_text(
        "import os, time\nif os.environ['RANK'] == '2':\n    raise ValueError('no such shard')\ntime.sleep(100)\n"
    )
    begin = time.monotonic()
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=2", "wait=true", "--", "boom.py")
    assert done.returncode != 0 and time.monotonic() - begin < 60
    assert re.search(
        r"^rank 2 on n2 failed first, [\d:]+ \(.*\): ValueError: no such shard$", done.stdout, re.MULTILINE
    )


def test_sbatch_refuses(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """A refusal shows sbatch's message with the line and the key at fault, and no run folder remains."""
    done = submit(hpcinit, slurm, "partition=zzz", "--", "true")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "hpcinit: error: sbatch --test-only: sbatch: error: invalid partition specified: zzz",
        "Invalid partition name specified",
        "caused by this line of the script:",
        "  #SBATCH --partition=zzz  set by partition",
        "to submit without this check: validate=false; nothing was submitted",
    ]
    assert list((tmp_path / "runs").iterdir()) == []


def test_run_again_manually(hpcinit: Run, slurm: MiniSlurm) -> None:
    """sbatch job.sh starts all ranks again, and status shows the new job. bash job.sh is refused."""
    done = submit(
        hpcinit, slurm, "nodes=2", "ranks_per_node=2", "wait=true", "--", "sh", "-c", "echo $RANK/$WORLD_SIZE"
    )
    folder = folder_of(done)
    assert f"run it again manually:  sbatch {folder}/job.sh\n" in done.stdout
    env = {**os.environ, **slurm.env}
    plain = subprocess.run(["bash", folder / "job.sh"], env=env, capture_output=True, text=True, check=False)
    assert (
        plain.returncode == 2 and f"not in a Slurm job; start the script with: sbatch {folder}/job.sh" in plain.stderr
    )
    again = slurm.run("sbatch", "--parsable", str(folder / "job.sh")).strip()
    assert hpcinit("logs", "-f", folder.name, env=slurm.env).returncode == 0
    deadline = time.monotonic() + 30
    while f"{again}  COMPLETED  started manually  exit status 0" not in hpcinit("status", again, env=slurm.env).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    logs = [printed(folder, rank) for rank in range(4)]
    assert logs == [f"{rank}/4\n" * 2 for rank in range(4)]


def test_a_job_that_can_never_start(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """More nodes than the cluster has are refused by --test-only.

    Without it Slurm 22.05 and 26.05 queue the job, and status explains the reason. 24.11 refuses it.
    """
    words = ["cluster.partitions.main.nodes=99", "nodes=9", "--", "true"]
    refused = submit(hpcinit, idle_slurm, *words)
    assert refused.returncode == 1 and "node configuration is not available" in refused.stderr
    done = submit(hpcinit, idle_slurm, "validate=false", *words)
    if (24, 11) <= tuple(map(int, idle_slurm.version().split(".")[:2])) < (26, 5):
        assert (done.returncode, done.stdout) == (1, "")
        assert "node configuration is not available" in done.stderr and "--nodes=9 " in done.stderr
        assert done.stderr.endswith("set by cpus_per_rank or cluster.cpus_per_node\nnothing was submitted\n")
        return
    deadline = time.monotonic() + 30
    while "more nodes" not in (said := hpcinit("status", folder_of(done).name, env=idle_slurm.env).stdout):
        assert time.monotonic() < deadline, said
        time.sleep(0.2)
    assert "PENDING" in said and "cancel it and request less" in said
    hpcinit("cancel", folder_of(done).name, env=idle_slurm.env)
    assert said.split()[2] == "PENDING"
    over = hpcinit("status", folder_of(done).name, env=idle_slurm.env).stdout
    assert "CANCELLED" in over and "Partition" not in over


def test_no_controller(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """With the controller stopped, hpcinit waits until its patience ends, reports it, and leaves no files."""
    slurm.stop_controller()
    try:
        done = submit(hpcinit, slurm, "cluster.submit_patience_s=5", "--", "true")
    finally:
        slurm.start_controller()
    assert done.returncode == 1 and "the controller did not accept the job within 5 s" in done.stderr
    assert done.stderr.endswith("nothing was submitted\n")
    assert not list((tmp_path / "runs").iterdir())


HOSTILE = ["$(touch HACKED)", "`touch HACKED`", "x; touch HACKED", "a b  c", "#SBATCH --nodes=3", "x # y", "$HOME \\$HOME",
           '"quoted" \'twice\'', "--nodes=3", "%j %t %%", "\\", "ünï", "*", "~", "!", "&& touch HACKED", "a\\nb"]  # fmt: skip


def test_hostile_values_are_data(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """Shell code in a comment, in variables and in arguments arrives as text and is not executed."""
    env = "".join(f"  V{i}: {json.dumps(text)}\n" for i, text in enumerate(HOSTILE))
    (tmp_path / "conf/job").mkdir(parents=True)
    (tmp_path / "conf/job/hostile.yaml").write_text(f"name: hostile\nenv:\n{env}")
    (tmp_path / "show.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], [v for k, v in os.environ.items() if k[0] == 'V' and k[1:].isdigit()]]))\n"
    )
    arguments = [*HOSTILE, "it's", "new\nline", ""]
    comment = "$(touch HACKED); `touch HACKED` # 'x' \"y\""
    override = "comment='" + comment.replace("'", "\\'") + "'"  # as Hydra quotes
    done = submit(hpcinit, slurm, "job=hostile", override, "ranks_per_node=1", "wait=true", "--", "show.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = json.loads(printed(folder_of(done), 0))
    assert (shown[0], sorted(shown[1])) == (arguments, sorted(HOSTILE))
    assert not list(tmp_path.rglob("HACKED"))
    assert f"Comment={comment}" in slurm.run("scontrol", "show", "job", str(job_id_of(done)))


WEIRD = ["with space", "50% %j", "$HOME", "ünï", "a;b", "#x", "(p)", "-dash", "two 'single' quotes", "~", "*"]


@pytest.mark.parametrize("name", WEIRD)
def test_weird_folders(
    hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Working folder, run folder, logs and script work in a folder with almost any name."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    (tmp_path / name / "hi.py").write_text("import os; print(os.getcwd())")
    done = submit(hpcinit, slurm, "ranks_per_node=1", "wait=true", "--", "hi.py")
    assert done.returncode == 0, done.stdout + done.stderr
    read_twice = "%j" in name and tuple(map(int, slurm.version().split(".")[:2])) >= (26, 5)  # docs: compatibility
    logs = tmp_path / name.replace("%j", job_id_of(done)) if read_twice else Path()
    assert printed(logs / "runs/hi-0001", 0) == f"{tmp_path / name}\n"


@pytest.mark.parametrize(
    ("name", "reason"), [("it's", "unbalanced '"), ("a\nb", "control character"), ("w\\b", "backslash")]
)
def test_folders_that_sbatch_would_misread(
    hpcinit: Run, slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    """A folder name that sbatch would misread is refused before any file is written."""
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    done = submit(hpcinit, slurm, "--", "true")
    assert done.returncode == 2 and reason in done.stderr and not Path("runs").exists()


def test_leftovers_of_another_job_do_not_reach_the_new_one(hpcinit: Run, slurm: MiniSlurm) -> None:
    """SBATCH_ and SLURM_ variables of another job change nothing, and one line lists the dropped ones."""
    env = {**slurm.env, "SBATCH_PARTITION": "zzz", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "RANK": "7"}
    done = hpcinit("submit", "cluster=mini", "ranks_per_node=1", "wait=true", "--", "sh", "-c", "echo $RANK", env=env)
    assert done.returncode == 0 and "not passed on to the job: RANK, SBATCH_PARTITION, SLURM_CPU_BIND" in done.stderr
    assert printed(folder_of(done), 0) == "0\n"


def test_local_engine_sets_what_slurm_sets(hpcinit: Run, slurm: MiniSlurm) -> None:
    """Each variable of the local engine has the same value in a real Slurm step of the same shape, except names."""
    shape = ["nodes=2", "ranks_per_node=2", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]
    show = ["wait=true", "--", sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    real = folder_of(submit(hpcinit, slurm, *shape, *show))
    local = folder_of(hpcinit("submit", "cluster=local", *shape, *show))
    for rank in range(4):
        theirs, ours = (json.loads(printed(f, rank)) for f in (real, local))
        names = {k for k in ours if k.startswith("SLURM")} - {"SLURM_CONF"}
        assert names <= set(theirs), sorted(names - set(theirs))
        same = {
            k
            for k in names
            if not any(
                word in k
                for word in ("NODELIST", "ADDR", "HOST", "JOB_ID", "JOBID", "PARTITION", "CLUSTER_NAME", "NODENAME")
            )
        }
        assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}
    assert local_step.nodelist(2) == "127.0.0.[1-2]"
