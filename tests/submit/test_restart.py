"""Requeue and continue, on the real Slurm: which ends are answered with another attempt, and how many of them."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from hpcinit.config import checks
from hpcinit.config.compose import compose
from hpcinit.submit import shell_blocks
from tests.conftest import Run
from tests.leaving_out import installed
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_id_of, printed, submit
from tests.waiting import until


def state(slurm: MiniSlurm, job: str) -> str:
    return slurm.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()


def log(folder: Path) -> str:
    return (folder / "logs/job.log").read_text()


def restarts(folder: Path) -> list[tuple[int, str, int | None, int]]:
    """Number, reason, furthest step and how many without progress, of each restart."""
    path = folder / "restarts.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [(line["restart"], line["reason"], line["step"], line["without_progress"]) for line in lines]


def finish(slurm: MiniSlurm, job: str, timeout_s: float = 90) -> str:
    """The job's last state."""
    deadline = time.monotonic() + timeout_s
    while (now := state(slurm, job)) not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED"):
        assert time.monotonic() < deadline, now
        if now == "PENDING":
            begin_now(slurm, job)
        time.sleep(0.3)
    return now


def begin_now(slurm: MiniSlurm, job: str) -> None:
    """Slurm begins a requeued job two minutes later. In the very second it would be refused: 'Job credential revoked'."""
    ask = ["squeue", "--noheader", f"--jobs={job}", "--Format=Restarts,Reason"]
    before = slurm.run(*ask)
    time.sleep(2)
    if "BeginTime" in before and slurm.run(*ask) == before:
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")


# --- what is refused, and what is rendered


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=mini", "restart.max_restarts=-1"], "restart.max_restarts is -1, expected 0 or more"),
        (["cluster=mini", "restart.without_progress=0"], "restart.without_progress is 0, expected 1 or more"),
        (
            ["cluster=mini", "restart.on=[hang,oom]"],
            "restart.on has 'oom', expected some of: preempted, node_fail, hang,",
        ),
        (["spare_nodes=1"], "spare_nodes is 1, but the nodes of cluster local are all this machine"),
        (["cluster=mini", "spare_nodes=-1"], "spare_nodes is -1, expected 0 or more"),
        (["restart.max_restarts=2"], "restart.max_restarts is 2, but cluster local has no queue (engine: local)"),
        (
            ["cluster=mini", "restart.max_restarts=2", "+cluster.sbatch.no-requeue=true"],
            "cluster.sbatch.no-requeue and restart.max_restarts=2: give one of them",
        ),
        (
            ["cluster=mini", "restart.max_restarts=2", "restart.on=[time_limit]", "chain=2"],
            "restart.on has time_limit, and so has chain=2, whose next job goes on: give one of them",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    """Each message names the key, the value and what is expected."""
    problems = checks.problems(compose(overrides))
    assert len(problems) == 1 and message in problems[0]


def test_who_asks_for_nothing_gets_no_line_of_it(hpcinit: Run) -> None:
    """By default the site's own way holds; 0 forbids Slurm to requeue, and a budget allows it."""
    texts = [
        hpcinit("submit", "cluster=mini", *words, "dry_run=true").stdout
        for words in ([], ["restart.max_restarts=0"], ["restart.max_restarts=1"])
    ]
    assert ["#SBATCH --requeue\n" in text for text in texts] == [False, False, True]
    assert ["#SBATCH --no-requeue\n" in text for text in texts] == [False, True, False]
    assert ["hpcinit_requeue" in text for text in texts] == [False, False, True]


@pytest.mark.parametrize(
    "words", [[], ["chain=3"], ["restart.on=[failure]", "restart.without_progress=null"], ["spare_nodes=1"]]
)
def test_the_script_is_valid_bash(hpcinit: Run, tmp_path: Path, words: list[str]) -> None:
    """bash and shellcheck have nothing to say about a script with restarts."""
    done = hpcinit("submit", "cluster=mini", "restart.max_restarts=2", *words, "dry_run=true", "--", "true")
    (tmp_path / "job.sh").write_text(done.stdout)
    assert "hpcinit_requeue" in done.stdout
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    subprocess.run([installed("shellcheck"), tmp_path / "job.sh"], check=True)


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
def test_the_preemption_of_an_attempt_before_does_not_count(times: str, preempted: bool) -> None:
    """Slurm keeps its time over the requeue: it counts from the start of this attempt on. (Words of scontrol stand in for
    it here; test_restart_training.py has the real one.)"""
    said = f"scontrol() {{ echo 'JobId=7 JobState=RUNNING {times} SuspendTime=None'; }}"
    script = "\n".join(["hpcinit_job=7", said, *shell_blocks.block("preempted"), "hpcinit_preempted"])
    assert (subprocess.run(["bash", "-uc", script], check=False).returncode == 0) is preempted


# --- on the cluster

# Ends with the exit statuses of its arguments, one an attempt, after it has told a step: '7@40' is status 7 at step 40.
ATTEMPTS = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["HPCINIT_RUN"])
status, _, step = sys.argv[1 + int(os.environ.get("SLURM_RESTART_COUNT", 0))].partition("@")
if step:
    (folder / "step.txt").write_text(f"step {step}\\n")  # as run.progress() does
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
    """The agreed exit status of a hang brings the job back; the program's own error ends it, with its status."""
    slurm = idle_slurm
    words = ["ranks_per_node=1", "restart.max_restarts=3", "--", "attempts.py", "76@10", "76@20", "7@30", "0"]
    done = submit(hpcinit, slurm, *words)
    folder, job = folder_of(done), job_id_of(done)
    assert finish(slurm, job) == "FAILED"
    assert printed(folder, 0) == "attempt 0\nattempt 1\nattempt 2\n", "the log is appended to"
    assert restarts(folder) == [(1, "hang", 10, 0), (2, "hang", 20, 0)]
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == 7
    assert f"hpcinit: job {job} is requeued (hang): restart 1 of at most 3\n" in log(folder)
    assert f"hpcinit: restart 2 of at most 3 of job {job} begins on n" in log(folder)


@pytest.mark.slurm
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("words", "statuses", "status", "message"),
    [
        (
            ["restart.max_restarts=2"], ["9@10", "9@20", "9@30", "0"], 9,
            "hpcinit: restart 3 (failure) is not begun: restart.max_restarts is 2; furthest step: 30\n",
        ),
        (
            ["restart.max_restarts=9"], ["9@10", "9@7", "9@10", "0"], 9,
            "hpcinit: restart 3 (failure) is not begun: 2 in a row have come no further than step 10 "
            "(restart.without_progress)\n",
        ),
        (["restart.max_restarts=9"], ["9", "9", "2", "0"], 2, "hpcinit: restart 2 of at most 9"),
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
    """The budget, attempts that come no further, and a status that says that the request is wrong end a job, in words."""
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
    """A task is requeued alone, also the one whose number of its own is the array's; records, status and why are its."""
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
    assert f"hpcinit: restart 1 of at most 1 of job {jobs[1]} begins on n" in log(run / "1")
    assert "restart 2 (hang) is not begun: restart.max_restarts is 1; furthest step: 20" in log(run / "2")
    told = hpcinit("status", "task-0001", "--json", env=slurm.env).stdout.splitlines()
    assert [json.loads(line)["restarts"]["count"] for line in told] == [0, 1, 1]
    why = hpcinit("why", "task-0001/2", env=slurm.env).stdout
    assert hpcinit("report", "task-0001/2").stdout.count("\n  queue ") == 2
    assert "SystemExit: 76" in why and "1 restart, 0 left: 1 hung (step 10)" in why, why


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_requeued_without_a_budget(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Slurm's requeue, or one by hand, has its line in the job's log as well: of two attempts `why` tells the last."""
    slurm, begins = idle_slurm, tmp_path / "begins"
    program = 'echo up >> begins; test -z "$SLURM_RESTART_COUNT" || { echo bad sample >&2; exit 5; }; exec sleep 300'
    done = submit(hpcinit, slurm, "ranks_per_node=1", "--", "bash", "-c", program)
    folder, job = folder_of(done), job_id_of(done)
    until(begins.exists)
    slurm.run("scontrol", "requeue", job)
    until(lambda: state(slurm, job) == "PENDING")
    assert finish(slurm, job) == "FAILED"
    assert f"\nhpcinit: restart 1 of job {job} begins on n" in log(folder)
    why = hpcinit("why", folder.name, env=slurm.env).stdout
    assert why.startswith("rank 0 on n") and "ended first, exited with exit code 5: bad sample" in why, why
    assert "1 restart: 1 requeued by Slurm" in why
    assert "1 restart" in hpcinit("status", folder.name, env=slurm.env).stdout
