"""A training run on the real Slurm that is preempted or loses a rank or a node ends like an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hpcinit.records import elastic_restarts, heartbeats
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, log, restarts, state
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

ARGS = ["--steps", "24", "--micro-batch", "4", "--context", "32", "--width", "32", "--heads", "2", "--layers", "1"]
# While the file `slow` exists every step is slow, so that the test acts in the middle of the run.
SLOW = (
    "import os, time; import torch.nn.functional as F; f = F.cross_entropy\n"
    "F.cross_entropy = lambda *a: (os.path.exists('slow') and time.sleep(0.5), f(*a))[1]\n"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return a list for the last line of an undisturbed training run."""
    return []


def started_run(hpcinit: Run, slurm: MiniSlurm, result: list[str], *words: str) -> Path:
    """Start a slow training run and wait until it has saved: 2 nodes, a checkpoint after every 4 of 24 steps."""
    Path("sitecustomize.py").write_text(SLOW)
    args = f"job.args=[{','.join([*ARGS, '--save-every', '4'])}]"
    common = ["nodes=2", "ranks_per_node=1", "launch=fork", "job=train_gpt", f"+job.env.PYTHONPATH={Path.cwd()}", args]
    if not result:
        through = folder_of(submit(hpcinit, slurm, *common, "name=through", "wait=true", timeout=200))
        result.append(printed(through, 0).splitlines()[-1])
        assert "in 24 steps" in result[0]
    Path("slow").touch()
    folder = folder_of(submit(hpcinit, slurm, *common, "restart.max_restarts=3", *words))
    until(lambda: list(folder.glob("checkpoints/step-*")), 120)
    return folder


def ranks_on(slurm: MiniSlurm, node: str, folder: Path) -> list[int]:
    """Return the process ids of the ranks on `node`."""
    own = [pid for pid in slurm.pids(node) if str(folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    return [pid for pid in own if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"rank ")]  # its title


def rank_on(slurm: MiniSlurm, node: str, folder: Path) -> int:
    """Return the process id of the only rank on `node`."""
    (found,) = ranks_on(slurm, node, folder)
    return found


def ranks_with_heartbeats(folder: Path, node: str) -> int:
    """Return for how many ranks `node` has written heartbeats."""
    nodes = (found for path in folder.glob(f"{heartbeats.FOLDER}/*") for found in heartbeats.read(path))
    return max((len(found.heartbeats) for found in nodes if found.host == node), default=0)


def assert_it_resumes(slurm: MiniSlurm, folder: Path, result: list[str]) -> None:
    """The next attempt starts from a checkpoint and ends with the same line as an undisturbed run."""
    Path("slow").unlink()
    assert finish(slurm, json.loads((folder / "submission.json").read_text())["job_id"], 200) == "COMPLETED", log(
        folder
    )
    text = (folder / "logs/rank-0.log").read_text()
    assert printed(folder, 0).splitlines()[-1] == result[0]
    steps = re.findall(r"^step +(\d+) ", text, re.MULTILINE)
    assert steps.count("1") == 1 and steps[-1] == "24", "the second attempt resumed"
    assert re.search(r"^hpcinit: restart 1 of job \d+ starts$", text, re.MULTILINE)


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_preempted_by_requeue(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """A job in the partition high takes the nodes without a grace time.

    Slurm requeues the training run, and it resumes.
    """
    slurm = idle_slurm
    folder = started_run(hpcinit, slurm, result)
    high = slurm.run("sbatch", "--parsable", "-N4", "--exclusive", "--partition=high", "--wrap=sleep 5").strip()
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    until(lambda: state(slurm, high) in ("RUNNING", "COMPLETED"))
    until(lambda: state(slurm, job) == "PENDING")
    assert_it_resumes(slurm, folder, result)
    assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "slurm")]


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_rank_that_is_killed(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """kill -9 of a rank is a failure, and with restart.on=[failure] the training run resumes."""
    slurm = idle_slurm
    folder = started_run(hpcinit, slurm, result, "restart.on=[failure]")
    os.kill(rank_on(slurm, "n2", folder), signal.SIGKILL)
    assert_it_resumes(slurm, folder, result)
    assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "failure")]


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_lost_node(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """If a node dies, the training run resumes on other nodes, whether Slurm or hpcinit requeues it."""
    slurm = idle_slurm
    folder = started_run(hpcinit, slurm, result)
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip() == "n[1-2]"
    slurm.kill_node("n2")
    try:
        assert_it_resumes(slurm, folder, result)
    finally:
        slurm.start_node("n2")
    assert [number for number, *_ in restarts(folder)] == [1] and restarts(folder)[0][1] in ("slurm", "node_fail")


GRACE = """
import hpcinit, os, pathlib, time
with hpcinit.session() as run:
    if os.environ.get("SLURM_RESTART_COUNT"):
        raise SystemExit(0)
    print("up", flush=True)
    while not (stop := run.should_stop()):
        time.sleep(0.1)
    print("saved:", stop.reason, flush=True)
"""


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_preempted_with_a_grace_time(hpcinit: Run, tmp_path: Path) -> None:
    """With GraceTime, SIGTERM is first. A program that saves and exits with 0 is requeued, and so is one that
    SIGTERM kills.

    Slurm 24.11 reports such a job as PREEMPTED, 22.05 and 26.05 as COMPLETED; hpcinit reports how its last attempt ended.
    """
    (tmp_path / "grace.py").write_text(GRACE)
    dies = 'test -n "$SLURM_RESTART_COUNT" || { echo up; exec sleep 300; }'
    with MiniSlurm(nodes=2, gpus=0, name=f"pytest-{os.getpid()}-grace") as slurm:
        slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=60", "PreemptMode=CANCEL")
        for name, words in (("saves", ["grace.py"]), ("dies", ["bash", "-c", dies])):
            asked = ["nodes=2", "ranks_per_node=1", f"name={name}", "cluster.gpus_per_node=0", "restart.max_restarts=3"]
            done = submit(hpcinit, slurm, *asked, "--", *words)
            folder, job = folder_of(done), job_id_of(done)
            until(lambda log=folder / "logs/rank-1.log": log.exists() and "up" in log.read_text())
            slurm.run("sbatch", "-N2", "--exclusive", "--partition=high", "--wrap=sleep 1")
            until(lambda job=job: state(slurm, job) == "PENDING")
            expected = "PREEMPTED" if slurm.version().startswith("24.11") else "COMPLETED"
            assert finish(slurm, job) == expected, log(folder)
            now = json.loads(hpcinit("status", "--json", folder.name, env=slurm.env).stdout)
            assert (now["state"], now["exit_status"]) == ("COMPLETED", 0)
            assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "preempted")]
            if name == "saves":
                assert "saved: preempted\n" in printed(folder, 0)


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "fault", ["node", *(pytest.param(fault, marks=pytest.mark.more) for fault in ("rank", "hang"))]
)
def test_a_spare_node_replaces_a_faulty_one(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str], fault: str) -> None:
    """With spare_nodes=1, the node that was lost, whose rank was killed, or that is frozen is excluded.

    The ranks resume inside the same job with the world of the step. The records of the first ranks are moved aside.
    """
    slurm = idle_slurm
    hang = ["hang.after_s=10", "hang.action=end", "ranks_per_node=2"] if fault == "hang" else []
    folder = started_run(hpcinit, slurm, result, "spare_nodes=1", "restart.on=[node_fail,failure,hang]", *hang)
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip() == "n[1-3]"
    if fault == "hang":  # the report needs heartbeats to name a node
        until(lambda: ranks_with_heartbeats(folder, "n2") == 2)
    if fault == "node":
        slurm.kill_node("n2")
    for rank in ranks_on(slurm, "n2", folder) if fault != "node" else []:
        os.kill(rank, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)
    try:
        until(lambda: "restarting the ranks in the same job, without n2" in log(folder), 120)
        Path("slow").unlink()
        assert finish(slurm, job) == "COMPLETED", log(folder)
    finally:
        slurm.start_node("n2")
    text = (folder / "logs/rank-0.log").read_text()
    assert re.findall(r"^step +(\d+) ", text, re.MULTILINE).count("1") == 1, "it resumed"
    assert len(re.findall("hpcinit: [24] ranks on 2 nodes", text)) == 2 and restarts(folder) == []
    if fault == "hang":
        assert "in 24 steps" in printed(folder, 0).splitlines()[-1]
        assert "hang on n2: restarting the ranks in the same job" in log(folder)
        assert not list(folder.glob(f"hang/{job}.*/report.txt"))
        (report,) = folder.glob("hang/before-*/*/report.txt")
        assert re.search(
            r"^node n2 has sent no heartbeat for \d\d s; it runs ranks 2-3$", report.read_text(), re.MULTILINE
        )
        assert "ranks 0-1 wait in " in report.read_text()
    else:
        assert printed(folder, 0).splitlines()[-1] == result[0]
        assert not list(folder.glob("errors/*.json")) or fault == "node"


HALF = """
import os, time
if "SLURM_RESTART_COUNT" not in os.environ:
    print("up", flush=True)
    time.sleep(300 if os.environ["RANK"] == "1" else 5)
    print("done", flush=True)
"""


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_lost_node_fails_the_step_although_the_other_ranks_have_succeeded(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path
) -> None:
    """Rank 0 has exited with 0 when rank 1's node is lost, and no spare node is left. The job is requeued once.

    srun reports 0, because with --no-kill the task of a lost node does not fail.
    """
    slurm = idle_slurm
    (tmp_path / "half.py").write_text(HALF)
    warm = ["launch=fork", "restart.warm=true", "spare_nodes=1", "restart.on=[node_fail]", "restart.max_restarts=2"]
    done = submit(hpcinit, slurm, "nodes=2", "ranks_per_node=1", *warm, "--", "half.py")
    folder, job = folder_of(done), job_id_of(done)
    until(lambda: (log := folder / "logs/rank-1.log").exists() and "up" in log.read_text(), 60)
    try:
        slurm.kill_node("n3")
        until(lambda: "done" in (folder / "logs/rank-0.log").read_text(), 60)
        until(lambda: not ranks_on(slurm, "n1", folder), 60)
        time.sleep(1)  # its fork server waits for the other ranks
        slurm.kill_node("n2")
        until(lambda: "the fork server on n2 is gone" in log(folder), 60)
        slurm.give_up("n2")
        slurm.give_up("n3")
        until(lambda: restarts(folder) or state(slurm, job) == "COMPLETED", 120)
    finally:
        slurm.start_node("n2")
        slurm.start_node("n3")
    assert finish(slurm, job) == "COMPLETED", log(folder)
    assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "node_fail")]
    assert "no more warm restarts: the fork server on n2 is gone" in log(folder)


@pytest.mark.more
@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_agents_restart_inside_the_job(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """With launch=torchrun a killed rank costs no requeue: all ranks restart in the same job from the checkpoint.

    They end with the same line as an undisturbed run.
    """
    slurm = idle_slurm
    folder = started_run(hpcinit, slurm, result, "launch=torchrun", "launch.max_restarts=2")
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    os.kill(rank_on(slurm, "n2", folder), signal.SIGKILL)
    until(lambda: f"elastic restart 1 of at most 2 of job {job} starts on n[1-2]: rank 1 on n2: Killed" in log(folder))
    Path("slow").unlink()
    assert finish(slurm, job, 200) == "COMPLETED", log(folder)
    assert printed(folder, 0).splitlines()[-1] == result[0]
    steps = re.findall(r"^step +(\d+) ", (folder / "logs/rank-0.log").read_text(), re.MULTILINE)
    assert steps.count("1") == 1 and steps[-1] == "24", "it resumed"
    assert restarts(folder) == [], "none of them counts in restart.max_restarts"
    assert not list((folder / "errors").glob("rank-*.json"))
    (restart,) = elastic_restarts.read(folder)
    assert (restart.rank, restart.host, restart.how) == (1, "n2", "Killed")
    assert 1 <= restart.step < 24  # progress.json can be a second behind the checkpoint
