"""A real training that is preempted, loses a rank or a node, on the real Slurm: it comes out as one that ran through."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from hpcinit.records import elastic_restarts, heartbeats
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import finish, log, restarts, state
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until

ARGS = ["--steps", "24", "--micro-batch", "4", "--context", "32", "--width", "32", "--heads", "2", "--layers", "1"]
# As long as the file `slow` is there every step takes long, so that the test comes in the middle.
SLOW = (
    "import os, time; import torch.nn.functional as F; f = F.cross_entropy\n"
    "F.cross_entropy = lambda *a: (os.path.exists('slow') and time.sleep(0.5), f(*a))[1]\n"
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The last line of a training that ran through, once it is known."""
    return []


def begun(hpcinit: Run, slurm: MiniSlurm, result: list[str], *words: str) -> Path:
    """A slow training in the middle: 2 nodes, a checkpoint after every 4 of 24 steps. It has saved at least one."""
    Path("sitecustomize.py").write_text(SLOW)
    args = f"job.args=[{','.join([*ARGS, '--save-every', '4'])}]"
    common = ["nodes=2", "ranks_per_node=1", "job=train_gpt", f"+job.env.PYTHONPATH={Path.cwd()}", args]
    if not result:
        through = folder_of(submit(hpcinit, slurm, *common, "name=through", "wait=true", timeout=200))
        result.append(printed(through, 0).splitlines()[-1])
        assert "in 24 steps" in result[0]
    Path("slow").touch()
    folder = folder_of(submit(hpcinit, slurm, *common, "restart.max_restarts=3", *words))
    until(lambda: list(folder.glob("checkpoints/step-*")), 120)
    return folder


def ranks_on(slurm: MiniSlurm, node: str, folder: Path) -> list[int]:
    """The processes of the ranks on `node`."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in slurm.pids(node)}
    return [pid for pid, line in lines.items() if b"hpcinit.run" in line and str(folder).encode() in line]


def rank_on(slurm: MiniSlurm, node: str, folder: Path) -> int:
    """The process of the only rank on `node`."""
    (found,) = ranks_on(slurm, node, folder)
    return found


def told_of(folder: Path, node: str) -> int:
    """Of how many ranks `node` has told that they live."""
    nodes = (found for path in folder.glob(f"{heartbeats.FOLDER}/*") for found in heartbeats.read(path))
    return max((len(found.beats) for found in nodes if found.host == node), default=0)


def goes_on(slurm: MiniSlurm, folder: Path, result: list[str]) -> None:
    """The next attempt begins after a checkpoint and comes out with the very line of one that ran through."""
    Path("slow").unlink()
    assert finish(slurm, json.loads((folder / "submission.json").read_text())["job_id"], 200) == "COMPLETED", log(
        folder
    )
    text = (folder / "logs/rank-0.log").read_text()
    assert printed(folder, 0).splitlines()[-1] == result[0]
    told = re.findall(r"^step +(\d+) ", text, re.MULTILINE)
    assert told.count("1") == 1 and told[-1] == "24", "the second attempt did not begin anew"
    assert re.search(r"^hpcinit: restart 1 of job \d+ begins$", text, re.MULTILINE)


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_preempted_by_requeue(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """A job of the partition high takes the nodes, without a grace time: Slurm requeues, and the training goes on."""
    slurm = idle_slurm
    folder = begun(hpcinit, slurm, result)
    high = slurm.run("sbatch", "--parsable", "-N4", "--exclusive", "--partition=high", "--wrap=sleep 5").strip()
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    until(lambda: state(slurm, high) in ("RUNNING", "COMPLETED"))
    until(lambda: state(slurm, job) == "PENDING")
    goes_on(slurm, folder, result)
    assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "slurm")]


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_rank_that_is_killed(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """kill -9 of a rank is a failure, and with restart.on=[failure] the training goes on."""
    slurm = idle_slurm
    folder = begun(hpcinit, slurm, result, "restart.on=[failure]")
    os.kill(rank_on(slurm, "n2", folder), signal.SIGKILL)
    goes_on(slurm, folder, result)
    assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "failure")]


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_a_lost_node(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """A node of the training dies: it goes on on the others, whoever has noticed it first."""
    slurm = idle_slurm
    folder = begun(hpcinit, slurm, result)
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip() == "n[1-2]"
    slurm.kill_node("n2")
    try:
        goes_on(slurm, folder, result)
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
    """With GraceTime SIGTERM comes first: who saves and ends well in it is requeued, although the job has ended with 0;
    and so is who does not, and dies of SIGTERM. Slurm 24.11 calls such a job PREEMPTED for good, we do not."""
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
            newer = tuple(map(int, slurm.version().split(".")[:2])) >= (24, 11)
            assert finish(slurm, job) == ("PREEMPTED" if newer else "COMPLETED"), log(folder)
            now = json.loads(hpcinit("status", "--json", folder.name, env=slurm.env).stdout)
            assert (now["name"], now["exit_status"]) == ("COMPLETED", 0)
            assert [(number, why) for number, why, *_ in restarts(folder)] == [(1, "preempted")]
            if name == "saves":
                assert "saved: preempted\n" in printed(folder, 0)


@pytest.mark.slurm
@pytest.mark.timeout(500)
@pytest.mark.parametrize("fault", ["rank", "node", "hang"])
def test_a_spare_node_takes_the_place(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str], fault: str) -> None:
    """With spare_nodes=1 a lost node, one whose rank is killed, and one that is frozen whole, is left out, and the ranks go on
    inside the same job, with the world of the step and not of the job. What the first ranks left is put aside."""
    slurm = idle_slurm
    hang = ["hang.after_s=10", "hang.action=end", "ranks_per_node=2"] if fault == "hang" else []
    folder = begun(hpcinit, slurm, result, "spare_nodes=1", "restart.on=[node_fail,failure,hang]", *hang)
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip() == "n[1-3]"
    if fault == "hang":  # of ranks that have not been heard of at all no node is known
        until(lambda: told_of(folder, "n2") == 2)
    if fault == "node":
        slurm.kill_node("n2")
    for rank in ranks_on(slurm, "n2", folder) if fault != "node" else []:
        os.kill(rank, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)
    try:
        until(lambda: "begin again in the same job, without n2" in log(folder), 120)
        Path("slow").unlink()
        assert finish(slurm, job) == "COMPLETED", log(folder)
    finally:
        slurm.start_node("n2")
    text = (folder / "logs/rank-0.log").read_text()
    assert re.findall(r"^step +(\d+) ", text, re.MULTILINE).count("1") == 1, "it went on"
    assert len(re.findall("hpcinit: [24] ranks on 2 nodes", text)) == 2 and restarts(folder) == []
    if fault == "hang":
        assert "in 24 steps" in printed(folder, 0).splitlines()[-1]
        assert "hang on n2: the ranks begin again in the same job" in log(folder)
        assert not list(folder.glob(f"hang/{job}.*/report.txt"))
        (report,) = folder.glob("hang/before-*/*/report.txt")
        assert re.search(
            r"^node n2 has said nothing for \d\d s: ranks 2-3 ran there$", report.read_text(), re.MULTILINE
        )
        assert "ranks 0-1 wait in " in report.read_text()
    else:
        assert printed(folder, 0).splitlines()[-1] == result[0]
        assert not list(folder.glob("errors/*.json")) or fault == "node"


@pytest.mark.slurm
@pytest.mark.timeout(500)
def test_agents_begin_again_inside_the_job(hpcinit: Run, idle_slurm: MiniSlurm, result: list[str]) -> None:
    """With launch=torchrun a rank that is killed costs no requeue: all begin again in the same job, from the checkpoint,
    and come out with the very line of a training that ran through."""
    slurm = idle_slurm
    folder = begun(hpcinit, slurm, result, "launch=torchrun", "launch.max_restarts=2")
    job = json.loads((folder / "submission.json").read_text())["job_id"]
    os.kill(rank_on(slurm, "n2", folder), signal.SIGKILL)
    until(lambda: f"elastic restart 1 of at most 2 of job {job} begins on n[1-2]: rank 1 on n2: Killed" in log(folder))
    Path("slow").unlink()
    assert finish(slurm, job, 200) == "COMPLETED", log(folder)
    assert printed(folder, 0).splitlines()[-1] == result[0]
    told = re.findall(r"^step +(\d+) ", (folder / "logs/rank-0.log").read_text(), re.MULTILINE)
    assert told.count("1") == 1 and told[-1] == "24", "it went on, and did not begin anew"
    assert restarts(folder) == [], "none of them counts in restart.max_restarts"
    assert not list((folder / "errors").glob("rank-*.json"))
    (restart,) = elastic_restarts.read(folder)
    assert (restart.rank, restart.host, restart.how) == (1, "n2", "Killed") and restart.step >= 4
