"""Requeue and resume on the real Slurm: which ends lead to another attempt, and how often."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.slurm import scontrol
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import installed
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until


def state(slurm: MiniSlurm, job: str) -> str:
    return slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


def log(folder: Path) -> str:
    return (folder / "logs/job.log").read_text()


def restarts(folder: Path) -> list[tuple[int, str, int | None, int]]:
    """Return number, reason, furthest step and the count without progress, for each restart."""
    path = folder / "restarts.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [(line["restart"], line["reason"], line["step"], line["without_progress"]) for line in lines]


def finish(slurm: MiniSlurm, job: str, timeout_s: float = 90) -> str:
    """Wait until the job is over and return its last state."""
    deadline = time.monotonic() + timeout_s
    while (now := state(slurm, job)) not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"):
        assert time.monotonic() < deadline, now
        if now == "PENDING":
            begin_now(slurm, job)
        time.sleep(0.3)
    return now


def begin_now(slurm: MiniSlurm, job: str) -> None:
    """Start a requeued job now, because Slurm waits two minutes.

    In the same second it would fail: 'Job credential revoked'.
    """
    ask = ["squeue", "--noheader", f"--jobs={job}", "--Format=Restarts,Reason"]
    before = slurm.run(*ask)
    time.sleep(2)
    if "BeginTime" in before and slurm.run(*ask) == before:
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")


# --- refused and rendered requests


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=mini", "restart.max_restarts=-1"], "restart.max_restarts is -1, expected 0 or more"),
        (["cluster=mini", "restart.without_progress=0"], "restart.without_progress is 0, expected 1 or more"),
        (
            ["cluster=mini", "restart.on=[hang,oom]"],
            "restart.on: unknown reason 'oom'; choose from preempted, node_fail, hang,",
        ),
        (["spare_nodes=1"], "spare_nodes is 1, but all nodes of cluster local are this machine"),
        (["cluster=mini", "spare_nodes=-1"], "spare_nodes is -1, expected 0 or more"),
        (["restart.max_restarts=2"], "restart.max_restarts is 2, but cluster local has no queue (engine: local)"),
        (
            ["cluster=mini", "restart.max_restarts=2", "+cluster.sbatch.no-requeue=true"],
            "cluster.sbatch.no-requeue and restart.max_restarts=2 are both set; remove one",
        ),
        (
            ["cluster=mini", "restart.max_restarts=2", "restart.on=[time_limit]", "chain=2"],
            "restart.on contains time_limit and chain is 2: both continue the run after a time limit; remove one",
        ),
    ],
)
def test_invalid_values_are_refused(overrides: list[str], message: str) -> None:
    """Each message names the key, the value and the expected value."""
    problems = all_checks.problems(compose(overrides))
    assert len(problems) == 1 and message in problems[0]


def test_restart_lines_only_if_requested(hpcinit: Run) -> None:
    """By default the site decides about requeues. max_restarts=0 forbids them, and a positive budget allows them."""
    texts = [
        hpcinit("submit", "cluster=mini", *words, "dry_run=true").stdout
        for words in ([], ["restart.max_restarts=0"], ["restart.max_restarts=1"])
    ]
    assert ["#SBATCH --requeue\n" in text for text in texts] == [False, False, True]
    assert ["#SBATCH --no-requeue\n" in text for text in texts] == [False, True, False]
    assert ["max_restarts=1 " in text for text in texts] == [False, False, True]


def test_warm_spare_nodes_are_part_of_the_step(hpcinit: Run) -> None:
    """srun starts a task on each node of the job, and a later step one on each node that is left."""
    words = ["cluster=mini", "nodes=2", "spare_nodes=2", "launch=fork", "restart.warm=true", "dry_run=true"]
    lines = hpcinit("submit", *words, "--", "true").stdout.partition("hpcinit_nodes=4\n")[2].splitlines()
    assert lines[0] == "while :; do" and '--nodes="$hpcinit_nodes" --ntasks="$hpcinit_nodes"' in lines[2]
    (count,) = (line for line in lines if "hpcinit_nodes=$" in line)
    script = f'hpcinit_excluded="n3,n1"\n{count}\necho "$hpcinit_nodes"'
    assert subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout == "2\n"
    assert "--no-kill" in "".join(lines)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["chain=3"],
        ["restart.on=[failure]", "restart.without_progress=null"],
        ["spare_nodes=1"],
        ["spare_nodes=1", "launch=fork", "restart.warm=true"],
    ],
)
def test_the_script_is_valid_bash(hpcinit: Run, tmp_path: Path, words: list[str]) -> None:
    """bash and shellcheck accept a script with restarts."""
    done = hpcinit("submit", "cluster=mini", "restart.max_restarts=2", *words, "dry_run=true", "--", "true")
    (tmp_path / "job.sh").write_text(done.stdout)
    assert "max_restarts=2 " in done.stdout or "max_restarts=2)" in done.stdout
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    subprocess.run([installed("shellcheck"), "--exclude=SC1090", tmp_path / "job.sh"], check=True)


@pytest.mark.parametrize(
    ("times", "preempted"),
    [
        ("StartTime=2026-11-21T14:00:00 PreemptEligibleTime=2026-11-21T14:00:00 PreemptTime=2026-11-21T14:02:00", True),
        ("StartTime=2026-11-21T14:02:00 PreemptEligibleTime=2026-11-21T14:02:00 PreemptTime=2026-11-21T14:02:00", True),
        (
            "StartTime=2026-11-21T14:02:30 PreemptEligibleTime=2026-11-21T14:02:30 PreemptTime=2026-11-21T14:02:00",
            False,
        ),
        ("StartTime=2026-11-21T14:00:00 PreemptEligibleTime=2026-11-21T14:00:00 PreemptTime=None", False),
        ("StartTime=2026-11-21T14:00:00 PreemptEligibleTime=2026-11-21T14:00:00", False),
        ("", False),
    ],
)
def test_the_preemption_of_an_earlier_attempt_does_not_count(times: str, preempted: bool) -> None:
    """Slurm keeps the preemption time over a requeue, so only a time after the start of this attempt counts.

    test_restart_training.py uses the real scontrol.
    """
    found = scontrol.records(f"JobId=7 JobName=x\n   JobState=RUNNING {times} SuspendTime=None\n", "JobId")
    assert bool(scontrol.preempted_at(found[0])) is preempted


# --- on the cluster

# Exit with the n-th argument in attempt n, after reporting a step: '7@40' is status 7 at step 40.
ATTEMPTS = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["HPCINIT_RUN"])
status, _, step = sys.argv[1 + int(os.environ.get("SLURM_RESTART_COUNT", 0))].partition("@")
if step:
    (folder / "progress.json").write_text(json.dumps({"step": int(step)}))  # as run.progress() does
print("attempt", os.environ.get("SLURM_RESTART_COUNT", 0), flush=True)
sys.exit(int(status))
"""


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    (tmp_path / "attempts.py").write_text(ATTEMPTS)
    return tmp_path / "attempts.py"


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_a_hang_is_requeued_and_a_failure_is_not(hpcinit: Run, idle_slurm: MiniSlurm, attempts: Path) -> None:
    """The exit status of a hang requeues the job. An error of the program ends it, with that status."""
    slurm = idle_slurm
    words = ["ranks_per_node=1", "restart.max_restarts=3", "--", "attempts.py", "76@10", "76@20", "7@30", "0"]
    done = submit(hpcinit, slurm, *words)
    folder, job = folder_of(done), job_id_of(done)
    assert finish(slurm, job) == "FAILED"
    assert printed(folder, 0) == "attempt 0\nattempt 1\nattempt 2\n", "the log is appended to"
    assert restarts(folder) == [(1, "hang", 10, 0), (2, "hang", 20, 0)]
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == 7
    assert f"hpcinit: job {job} is requeued (hang): restart 1 of at most 3\n" in log(folder)
    assert f"hpcinit: new attempt: restart 2 of job {job} starts on n" in log(folder)


@pytest.mark.slurm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "statuses", "status", "message"),
    [
        (
            ["restart.max_restarts=2"], ["9@10", "9@20", "9@30", "0"], 9,
            "hpcinit: no restart 3 (failure): restart.max_restarts is 2; furthest step: 30\n",
        ),
        (
            ["restart.max_restarts=9"], ["9@10", "9@7", "9@10", "0"], 9,
            "hpcinit: no restart 3 (failure): 2 restarts in a row made no progress beyond step 10 "
            "(restart.without_progress)\n",
        ),
        (["restart.max_restarts=9"], ["9", "9", "2", "0"], 2, "hpcinit: new attempt: restart 2 of job "),
    ],
    ids=["budget", "progress", "wrong request"],
)  # fmt: skip
def test_restarts_end(
    hpcinit: Run,
    idle_slurm: MiniSlurm,
    attempts: Path,
    words: list[str],
    statuses: list[str],
    status: int,
    message: str,
) -> None:
    """A used-up budget, attempts without progress, and a usage error end the job with a message."""
    slurm = idle_slurm
    done = submit(hpcinit, slurm, "ranks_per_node=1", "restart.on=[failure]", *words, "--", "attempts.py", *statuses)
    folder, job = folder_of(done), job_id_of(done)
    assert finish(slurm, job) == "FAILED"
    assert printed(folder, 0) == "attempt 0\nattempt 1\nattempt 2\n"
    assert message in log(folder)
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == status


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_each_task_of_a_sweep_has_its_own_budget(hpcinit: Run, idle_slurm: MiniSlurm, attempts: Path) -> None:
    """A task is requeued alone, even the task whose job id is the array's. Records, status and why are separate."""
    slurm, more = idle_slurm, ["ranks_per_node=1", "cluster.gpu_flag=null", "restart.max_restarts=1"]
    lists = "job.args=[wait],[76@10,0],[76@10,76@20,0]"
    (attempts.parent / "task.py").write_text(
        f"import sys, os, time\nwhile sys.argv[1] == 'wait' and not os.path.exists('go'): time.sleep(0.1)\n"
        f"sys.argv[1:] = ['0'] if sys.argv[1] == 'wait' else sys.argv[1:]\n{ATTEMPTS}"
    )
    done = submit(hpcinit, slurm, "-m", *more, lists, "--", "task.py")
    run = attempts.parent / "runs/task-0001"
    assert done.returncode == 0, done.stderr
    jobs = [json.loads((run / f"{task}/submission.json").read_text())["job_id"] for task in range(3)]
    assert [finish(slurm, job) for job in jobs[1:]] == ["COMPLETED", "FAILED"]
    assert state(slurm, jobs[0]) == "RUNNING", "it is left alone when others are requeued"
    (attempts.parent / "go").touch()
    assert finish(slurm, jobs[0]) == "COMPLETED"
    assert [restarts(run / f"{task}") for task in range(3)] == [[], [(1, "hang", 10, 0)], [(1, "hang", 10, 0)]]
    assert [printed(run / f"{task}", 0) for task in range(3)] == ["attempt 0\n"] + ["attempt 0\nattempt 1\n"] * 2
    assert f"hpcinit: new attempt: restart 1 of job {jobs[1]} starts on n" in log(run / "1")
    assert "no restart 2 (hang): restart.max_restarts is 1; furthest step: 20" in log(run / "2")
    lines = hpcinit("status", "task-0001", "--json", env=slurm.env).stdout.splitlines()
    assert [json.loads(line)["restarts"]["count"] for line in lines] == [0, 1, 1]
    why = hpcinit("why", "task-0001/2", env=slurm.env).stdout
    assert hpcinit("report", "task-0001/2").stdout.count("\n  queue ") == 2
    assert "SystemExit: 76" in why and "1 restart, 0 left: 1 hung (step 10)" in why, why


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_requeued_without_a_budget(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """A requeue by Slurm or scontrol is logged as well, and `why` reports the last of two attempts."""
    slurm, begins = idle_slurm, tmp_path / "begins"
    program = 'echo up >> begins; test -z "$SLURM_RESTART_COUNT" || { echo bad sample >&2; exit 5; }; exec sleep 300'
    done = submit(hpcinit, slurm, "ranks_per_node=1", "--", "bash", "-c", program)
    folder, job = folder_of(done), job_id_of(done)
    until(begins.exists)
    slurm.run("scontrol", "requeue", job)
    until(lambda: state(slurm, job) == "PENDING")
    assert finish(slurm, job) == "FAILED"
    assert f"\nhpcinit: new attempt: restart 1 of job {job} starts on n" in log(folder)
    why = hpcinit("why", folder.name, env=slurm.env).stdout
    assert why.startswith("rank 0 on n") and "failed first: exited with exit code 5: bad sample" in why, why
    assert "1 restart: 1 requeued by Slurm" in why
    assert "1 restart" in hpcinit("status", folder.name, env=slurm.env).stdout


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_a_node_that_is_lost_before_the_ranks_start(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """srun would wait forever for its task. The ranks start without the node, although the node works again."""
    slurm, more = idle_slurm, ["nodes=2", "ranks_per_node=1", "spare_nodes=1", "launch=fork", "restart.warm=true"]
    more += [
        "launch.preload=[]",
        "+cluster.srun.immediate=2",
        'cluster.setup=["touch setup; until test -e go; do sleep 0.1; done"]',
    ]
    done = submit(hpcinit, slurm, *more, "--", "bash", "-c", "echo ranks $WORLD_SIZE")
    folder, job = folder_of(done), job_id_of(done)
    until((tmp_path / "setup").exists)
    assert slurm.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip() == "n[1-3]"
    slurm.give_up("n3")
    until(lambda: slurm.node_states()["n3"].startswith("idle"))
    (tmp_path / "go").touch()
    assert finish(slurm, job) == "COMPLETED", log(folder)
    assert "hpcinit: new attempt: node_fail on n3: restarting the ranks in the same job, without n3" in log(folder)
    assert printed(folder, 0) == "ranks 2\n" and restarts(folder) == []
