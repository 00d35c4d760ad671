"""Job dependencies and chains of jobs, on the real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base.errors import ConfigError
from hpcinit.checks import all_checks
from hpcinit.config.compose import compose
from hpcinit.config.overrides import with_quoted_lists
from hpcinit.records import run_folder
from hpcinit.submit import shell_blocks
from tests import json_documents
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import installed
from tests.submitting import folder_of, printed, submit
from tests.waiting import until


def status(hpcinit: Run, slurm: MiniSlurm, folder: Path) -> dict[str, object]:
    return json_documents.parse(hpcinit("status", "--json", str(folder), env=slurm.env).stdout, "status")[0]


def jobs(folder: Path) -> list[str]:
    return json.loads((folder / "submission.json").read_text())["jobs"]


def states(slurm: MiniSlurm, ids: list[str]) -> list[str]:
    lines = slurm.run("squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i %T").splitlines()
    known = dict(line.split() for line in lines)
    return [known.get(job, "forgotten") for job in ids]  # Slurm purges a job MinJobAge (5 minutes) after its end


# --- refused without querying Slurm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=mini", "chain=0"], "chain is 0, expected 1 or more"),
        (["cluster=mini", "chain=101"], "chain is 101, expected at most 100"),
        (
            ["cluster=mini", "dependency=train-0001"],
            "dependency has 'train-0001', expected Slurm's syntax, such as afterok:JOB",
        ),
        (["cluster=mini", "dependency='train-0001'"], "; did you mean afterok:train-0001?"),
        (["cluster=mini", "dependency='aftr:4242'"], "; the types are after, afterany, afterburstbuffer, aftercorr"),
        (
            ["cluster=mini", "dependency='afterok:4242:'"],
            "dependency has 'afterok:4242:' without a job, expected for example",
        ),
        (
            ["cluster=mini", "dependency='afterok:1,singleton:2'"],
            "dependency has 'singleton:2', expected Slurm's syntax",
        ),
        (
            ["cluster=mini", "dependency='afterok:1,afterany:2?after:3'"],
            "Slurm does not combine ',' (all) and '?' (any)",
        ),
        (["cluster=mini", "dependency='afterok:3+5'"], "only 'after' accepts a delay; use afterok:3"),
        (
            ["dependency='afterok:1'"],
            "dependency is set, but cluster local has no queue (engine: local), so jobs start",
        ),
        (["chain=2", "dependency=singleton"], "dependency, chain are set, but cluster local has no queue"),
        (["cluster=mini", "+cluster.sbatch.dependency=singleton"], "dependency: use dependency instead"),
        (["cluster=mini", "snapshot=rsync"], "snapshot is 'rsync', expected one of: none, git"),
        (["cluster=mini", "snapshot_max_mb=0"], "snapshot_max_mb is 0, expected more than 0"),
    ],
)
def test_invalid_values_are_refused(overrides: list[str], message: str) -> None:
    """Each message names the key, the value and the expected value."""
    problems = all_checks.problems(compose(overrides))
    assert len(problems) == 1 and message in problems[0]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("dependency=afterany:4242_7", "dependency='afterany:4242_7'"),
        ("dependency=afterok:4242_7:x-0001,singleton", "dependency='afterok:4242_7:x-0001,singleton'"),
        ("dependency='afterok:4242_7'", "dependency='afterok:4242_7'"),
        ("dependency=after:1+5?afterok:runs/x-0001", "dependency='after:1+5?afterok:runs/x-0001'"),
        ("dependency=null", "dependency=null"),
        ("name=4242_7", "name=4242_7"),
    ],
)
def test_slurms_text_is_not_read_by_hydra(written: str, read: str) -> None:
    """The value is text for Hydra, which would sweep over the commas and read 4242_7 as the number 42427."""
    assert with_quoted_lists([written]) == [read]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("after=4242", "did you mean dependency=afterany:JOB?"),
        ("after_ok=train-0001", "did you mean dependency=afterok:JOB?"),
        ("singleton=true", "did you mean dependency=singleton?"),
        ("test_only=false", "did you mean validate=...?"),
    ],
)
def test_old_keys_are_refused(key: str, advice: str) -> None:
    """A key of an earlier version is an error that names the new one."""
    with pytest.raises(ConfigError, match=re.escape(f"{key}: {advice}")):
        compose(["cluster=mini", key])


def test_a_plain_script_has_no_chain_lines(hpcinit: Run) -> None:
    """Without these keys the script has no lines about chains or dependencies."""
    text = hpcinit("submit", "cluster=mini", "dry_run=true").stdout
    assert "dependency" not in text and "of a chain" not in text


@pytest.mark.parametrize(
    ("record", "status", "said"),
    [
        ("", None, ""),  # killed, or there is more to do
        ("7 16", None, ""),  # this job, requeued
        ("0 15", 0, "job 15 of this chain completed, so job 16 has nothing to do"),
        ("7 15", 7, "job 15 of this chain failed with exit status 7, so job 16 runs nothing"),
    ],
)
def test_the_record_of_the_previous_job_decides(tmp_path: Path, record: str, status: int | None, said: str) -> None:
    """The job runs (None), or ends with the given status and prints why."""
    chain = tmp_path / run_folder.CHAIN
    if record:
        chain.write_text(f"{record}\n")
    script = "\n".join(["SLURM_JOB_ID=16", f"HPCINIT_RUN={tmp_path}", *shell_blocks.block("chain"), "exit 99"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (99 if status is None else status, "")
    assert said in done.stdout and ("job 16 of a chain starts" in done.stdout) == (status is None)
    assert chain.exists() == (status is not None), "the next job reads the record of this one"


# --- dependency


@pytest.mark.slurm
def test_a_job_waits_for_jobs_and_runs(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """Runs in dependency=... become job ids, and Slurm waits for them."""
    slurm = idle_slurm
    first = folder_of(submit(hpcinit, slurm, "ranks_per_node=1", "name=first", "--", "sleep", "300"))
    chain = folder_of(submit(hpcinit, slurm, "ranks_per_node=1", "name=links", "chain=2", "--", "sleep", "300"))
    array = slurm.run("sbatch", "--parsable", "--hold", "--array=0-7", "--wrap=true").strip()
    one = json.loads((first / "submission.json").read_text())["job_id"]
    asked = f"dependency=afterany:{array}_7:first-0001,afterok:{chain},after:links-0001+1,singleton"
    done = submit(hpcinit, slurm, asked, "ranks_per_node=1", "--", "true")
    expected = f"afterany:{array}_7:{one},afterok:{jobs(chain)[-1]},after:{jobs(chain)[0]}+1,singleton"
    assert "Slurm expects" not in done.stdout  # --test-only ignores dependencies
    assert f"#SBATCH --dependency={expected}\n" in (folder_of(done) / "job.sh").read_text()
    now = status(hpcinit, slurm, folder_of(done))
    assert (now["state"], now["reason"]) == ("PENDING", "Dependency")
    slurm.run("scancel", array)
    assert hpcinit("cancel", "first-0001", "links-0001", env=slurm.env).returncode == 0
    until(lambda: status(hpcinit, slurm, folder_of(done))["reason"] == "DependencyNeverSatisfied")


@pytest.mark.slurm
def test_jobs_that_have_ended(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A job that already ended as required is not waited for. One whose end rules out the start is refused, unless
    another condition is enough."""
    slurm = idle_slurm
    good = submit(hpcinit, slurm, "ranks_per_node=1", "name=good", "wait=true", "--", "true")
    bad = submit(hpcinit, slurm, "ranks_per_node=1", "name=bad", "wait=true", "--", "false")
    assert (good.returncode, bad.returncode) == (0, 1)
    for asked in (
        "afterany:good-0001:bad-0001,afterok:good-0001,afternotok:bad-0001,after:good-0001",
        "afterok:bad-0001?afterok:good-0001",
    ):
        done = submit(hpcinit, slurm, f"dependency={asked}", "dry_run=true", "--", "true")
        assert done.returncode == 0 and "#SBATCH --dependency" not in done.stdout, done.stderr
    for asked, name, end in (
        ("afterok:bad-0001", "bad-0001", "FAILED"),
        ("afternotok:good-0001", "good-0001", "COMPLETED"),
        ("afternotok:good-0001?afterok:bad-0001", "good-0001", "COMPLETED"),
    ):
        done = submit(hpcinit, slurm, f"dependency={asked}", "--", "true")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{name}: job " in done.stderr and f"ended as {end}, so this job would never start" in done.stderr


@pytest.mark.slurm
def test_after_a_sweep(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A sweep means all its arrays, an array all its tasks. One failed task means that the sweep failed."""
    small = ["ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.gpu_flag=null", "cpus_per_rank=1"]
    submit(hpcinit, idle_slurm, "-m", "nodes=1,2", "seed=0,1", "name=going", *small, "--", "sleep", "300")
    fails = "exit $(grep -c '^seed: 1' $HPCINIT_RUN/config.yaml)"
    words = ["-m", "seed=0,1", "name=half", "wait=true", *small, "--", "sh", "-c", fails]
    assert submit(hpcinit, idle_slurm, *words).returncode == 1
    first, second = (job["job_id"] for job in json.loads(Path("runs/going-0001/submission.json").read_text())["sweep"])
    half = json.loads(Path("runs/half-0001/submission.json").read_text())["job_id"]

    def asked(waits: str) -> str:
        done = submit(hpcinit, idle_slurm, f"dependency={waits}", *small, "dry_run=true", "--", "true")
        return done.stderr if done.returncode else "".join(re.findall("#SBATCH --dependency=(.*)", done.stdout))

    assert asked("afterany:going-0001") == f"afterany:{first}:{second}"
    assert asked(f"afterok:{first}") == f"afterok:{first}"
    assert asked(f"afterany:half-0001,afterok:{half}_0") == "" and asked(f"afterany:{half}") == ""
    for name in ("half-0001", half):
        said = asked(f"afterok:{name}")
        assert f"dependency=afterok:{name}: job {half}_1 ended as FAILED, so this job would never start" in said


@pytest.mark.slurm
def test_unknown_jobs(hpcinit: Run, slurm: MiniSlurm, tmp_path: Path) -> None:
    """An unknown job, an unknown run and a local run are all reported in one pass.

    Slurm 22.05 accepts any id, and starts the job at once.
    """
    assert submit(hpcinit, slurm, "cluster=local", "name=here", "wait=true", "--", "true").returncode == 0
    asked = "dependency=afterany:987654:nope-0001,afterok:here-0001"
    done = submit(hpcinit, slurm, asked, "name=x", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[2].startswith(
        "hpcinit: error: dependency=afterany:987654: Slurm has no record of job 987654 and would start this job at once"
    )
    assert lines[0].startswith(
        "hpcinit: error: dependency=afterany:nope-0001: no run 'nope-0001': no run folder or job has this name"
    )
    assert (
        "dependency=afterok:here-0001: runs/here-0001 runs without Slurm (engine: local)" in lines[1]
        and len(lines) == 3
    )
    assert not (tmp_path / "runs/x-0001").exists()


def test_a_dry_run_without_slurm_accepts_any_id(hpcinit: Run) -> None:
    """Without Slurm on PATH, job ids cannot be checked, and the script is rendered anyway."""
    path = {"PATH": f"{Path(sys.executable).parent}:/nowhere"}
    done = hpcinit("submit", "cluster=mini", "dependency=afterok:4242_7", "dry_run=true", env=path)
    assert (done.returncode, done.stderr) == (0, "") and "#SBATCH --dependency=afterok:4242_7\n" in done.stdout


# --- chains

# Exit with the n-th argument in attempt n.
ATTEMPTS = """
import os, pathlib, sys, time
count = pathlib.Path(os.environ["HPCINIT_RUN"], "attempts")
done = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (done + 1))
while pathlib.Path("wait").exists():
    time.sleep(0.1)
print("attempt", done + 1, flush=True)
sys.exit(int(sys.argv[1 + done]))
"""


@pytest.fixture
def attempts(tmp_path: Path) -> Path:
    (tmp_path / "attempts.py").write_text(ATTEMPTS)
    return tmp_path / "attempts.py"


@pytest.mark.slurm
def test_a_chain_continues_until_the_program_is_done(hpcinit: Run, idle_slurm: MiniSlurm, attempts: Path) -> None:
    """The next job starts after an attempt that was terminated (143). After the first success, nothing runs."""
    slurm = idle_slurm
    words = ["chain=4", "ranks_per_node=1", "wait=true", "--", "attempts.py", "143", "143", "0", "0"]
    done = submit(hpcinit, slurm, *words)
    folder = folder_of(done)
    ids = jobs(folder)
    assert done.returncode == 0 and f"chain: jobs {', '.join(ids)}, each starts after the previous one" in done.stdout
    assert printed(folder, 0) == "attempt 1\nattempt 2\nattempt 3\n"
    until(lambda: states(slurm, ids)[-1] == "COMPLETED")
    assert states(slurm, ids) == ["FAILED", "FAILED", "COMPLETED", "COMPLETED"]
    now = status(hpcinit, slurm, folder)
    assert (now["state"], now["exit_status"], now["job_id"]) == ("COMPLETED", 0, ids[2])
    assert now["link"] == "job 3 of a chain of 4"
    assert (
        f"job {ids[2]} of this chain completed, so job {ids[3]} has nothing to do"
        in (folder / "logs/job.log").read_text()
    )
    assert hpcinit("status", ids[3], env=slurm.env).stdout.startswith(folder.name)


# In the first attempt rank 1 ends with the given status, and srun terminates rank 0, which sleeps. The second succeeds.
OF_TWO = """
import os, pathlib, sys, time
folder = pathlib.Path(os.environ["HPCINIT_RUN"])
sleeps, again = folder / "sleeps", folder / "again"
if again.exists():
    print("again", flush=True)
elif os.environ["SLURM_PROCID"] == "0":
    sleeps.touch()
    time.sleep(300)
else:
    while not sleeps.exists():
        time.sleep(0.1)
    again.touch()
    status = int(sys.argv[1])
    os.kill(os.getpid(), status - 128) if status > 128 else sys.exit(status)
"""


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("chain", "status", "recorded"),
    [
        (2, 7, 7),
        (2, 143, 0),
        *(pytest.param(1, status, status, marks=pytest.mark.more) for status in (7, 137, 134)),
        (1, 143, 143),
    ],
)
def test_a_rank_that_fails_and_one_that_srun_terminates(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, chain: int, status: int, recorded: int
) -> None:
    """srun returns 143, as if Slurm had ended the job, but the status of the rank that failed first counts."""
    (tmp_path / "two.py").write_text(OF_TWO)
    words = [f"chain={chain}", "nodes=2", "ranks_per_node=1", "wait=true", "--", "two.py", str(status)]
    done = submit(hpcinit, idle_slurm, *words)
    folder = folder_of(done)
    if chain > 1:
        until(lambda: states(idle_slurm, jobs(folder))[-1] in ("COMPLETED", "FAILED"))
    assert done.returncode == recorded, done.stdout
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == recorded
    assert printed(folder, 1) == ("" if recorded else "again\n")
    assert ("failed with exit status 7, so job" in (folder / "logs/job.log").read_text()) == (chain > 1 and status == 7)


@pytest.mark.slurm
def test_a_chain_ends_when_the_program_fails(hpcinit: Run, idle_slurm: MiniSlurm, attempts: Path) -> None:
    """After a failed attempt, the later jobs of the chain fail at once, and a job with afterok never starts."""
    slurm = idle_slurm
    Path("wait").touch()
    words = ["chain=3", "ranks_per_node=1", "name=x", "--", "attempts.py", "143", "7", "0"]
    folder = folder_of(submit(hpcinit, slurm, *words))
    after = folder_of(submit(hpcinit, slurm, "dependency=afterok:x-0001", "ranks_per_node=1", "--", "true"))
    Path("wait").unlink()  # afterok is refused once an attempt failed
    assert hpcinit("logs", "-f", "x-0001", env=slurm.env).returncode == 0
    until(lambda: states(slurm, jobs(folder)) == ["FAILED"] * 3)
    assert printed(folder, 0) == "attempt 1\nattempt 2\n"
    now = status(hpcinit, slurm, folder)
    assert (now["state"], now["exit_status"], now["link"]) == ("FAILED", 7, "job 2 of a chain of 3")
    assert "failed with exit status 7, so job" in (folder / "logs/job.log").read_text()
    until(lambda: status(hpcinit, slurm, after)["reason"] == "DependencyNeverSatisfied")


@pytest.mark.slurm
def test_cancel_ends_the_whole_chain(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """hpcinit cancel cancels the running job and the waiting ones. The status names the running job."""
    slurm = idle_slurm
    folder = folder_of(submit(hpcinit, slurm, "chain=3", "ranks_per_node=1", "--", "sh", "-c", "echo up; sleep 300"))
    until(lambda: (folder / "logs/rank-0.log").exists() and "up" in printed(folder, 0))
    ids = jobs(folder)
    assert f"{ids[0]}  RUNNING    job 1 of a chain of 3" in hpcinit("status", folder.name, env=slurm.env).stdout
    assert hpcinit("cancel", folder.name, env=slurm.env).stdout == (
        f"{folder.name}: jobs {', '.join(ids)} are being canceled\n"
    )
    until(lambda: states(slurm, ids) == ["CANCELLED"] * 3)
    assert printed(folder, 0).count("up\n") == 1
    assert hpcinit("cancel", folder.name, env=slurm.env).stdout == f"{folder.name}: has already ended: CANCELLED\n"


@pytest.mark.slurm
def test_the_next_job_starts_after_a_kill_or_scancel(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """The next job of a chain starts after scancel, and after SIGKILL to the batch script, which leaves no record."""
    slurm = idle_slurm
    folder = folder_of(
        submit(hpcinit, slurm, "chain=3", "ranks_per_node=1", "--", "sh", "-c", "echo up; exec sleep 300")
    )
    ids = jobs(folder)
    for number, end in enumerate((["scancel"], ["scancel", "--full", "--signal=KILL"], ["scancel"])):
        until(lambda ups=number + 1: (folder / "logs/rank-0.log").exists() and printed(folder, 0).count("up\n") == ups)
        slurm.run(*end, ids[number])
    until(lambda: states(slurm, ids)[2] == "CANCELLED")
    assert status(hpcinit, slurm, folder)["link"] == "job 3 of a chain of 3"


@pytest.mark.slurm
@pytest.mark.timeout(600)
def test_a_lost_node_does_not_end_a_chain(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """If a node dies, the ranks on other nodes fail too, but the next job starts because srun reported the lost node."""
    slurm = idle_slurm
    # Only the ranks of the first job fail, because the next job may start at once.
    (tmp_path / "job.py").write_text(
        "import os, pathlib, time\nfirst, job = pathlib.Path('first'), os.environ['SLURM_JOB_ID']\n"
        "first.exists() or first.write_text(job)\n"
        "print('up', flush=True)\nwhile not pathlib.Path('lost').exists(): time.sleep(0.1)\n"
        "raise SystemExit(first.read_text() == job and 'a peer is gone' or 0)\n"
    )
    words = ["chain=2", "nodes=2", "ranks_per_node=1", "+cluster.sbatch.no-requeue=true", "--", "job.py"]
    folder = folder_of(submit(hpcinit, slurm, *words))
    until(lambda: (folder / "logs/rank-1.log").exists() and "up" in printed(folder, 1))
    node = slurm.run("squeue", "--noheader", f"--jobs={jobs(folder)[0]}", "--format=%N").strip()
    assert node == "n[1-2]"
    slurm.kill_node("n2")
    try:
        (tmp_path / "lost").touch()
        until(lambda: states(slurm, jobs(folder))[0] != "RUNNING")
        slurm.give_up("n2")  # until then the job is COMPLETING, and the next one waits
        until(lambda: states(slurm, jobs(folder))[1] == "COMPLETED")
    finally:
        slurm.start_node("n2")
    assert status(hpcinit, slurm, folder)["link"] == "job 2 of a chain of 2"
    assert printed(folder, 0).count("up") == 2 and "a peer is gone" in printed(folder, 0)


@pytest.mark.slurm
@pytest.mark.timeout(700)
def test_a_training_run_longer_than_the_time_limit(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """A training run that hits the time limit resumes in the next job and ends with the same loss as without a limit."""
    slurm = idle_slurm
    args = "job.args=[--steps,24,--micro-batch,4,--context,32,--width,32,--heads,2,--layers,1,--save-every,4]"
    common = ["nodes=2", "ranks_per_node=1", "job=train_gpt", args]
    through = folder_of(submit(hpcinit, slurm, *common, "wait=true", timeout=200))
    # In the first job every step after the first save is slow, so that the time limit is first: Slurm checks it every
    # 30 s. In the second job no step is slow.
    slow = (
        "import os, time; from pathlib import Path; import torch.nn.functional as F; f = F.cross_entropy\n"
        "if os.path.exists('slow'):\n"
        f"    saves = lambda: any(Path({str(Path.cwd())!r}).glob('runs/train_gpt-0002/checkpoints/step-*[0-9]'))\n"
        "    F.cross_entropy = lambda *a: (time.sleep(6 * saves()), f(*a))[1]\n"
    )
    Path("sitecustomize.py").write_text(slow)
    Path("slow").touch()
    words = [*common, "chain=3", "time_min=1", f"+job.env.PYTHONPATH={Path.cwd()}"]
    folder = folder_of(submit(hpcinit, slurm, *words))
    ids = jobs(folder)
    until(lambda: states(slurm, ids)[0] == "TIMEOUT", 240)
    Path("slow").unlink()
    until(lambda: states(slurm, ids)[2] in ("COMPLETED", "FAILED"), 240)
    assert states(slurm, ids) == ["TIMEOUT", "COMPLETED", "COMPLETED"], (folder / "logs/rank-0.log").read_text()
    assert status(hpcinit, slurm, folder)["link"] == "job 2 of a chain of 3"
    last = [(run / "logs/rank-0.log").read_text().splitlines()[-1] for run in (through, folder)]
    assert last[0] == last[1] and "in 24 steps" in last[0]
    begun = re.findall(r"^step +(\d+) ", (folder / "logs/rank-0.log").read_text(), re.MULTILINE)
    assert begun.count("1") == 1 and begun[-1] == "24", "the second job resumed"


STOPPING = """
import hpcinit, pathlib, time
with hpcinit.session() as run:
    print("up", flush=True)
    while not pathlib.Path("finish").exists():
        if stop := run.should_stop():
            print(stop.reason, flush=True)
            break
        time.sleep(0.1)
"""


@pytest.mark.slurm
@pytest.mark.parametrize("asked", ["signal", "user"])
def test_a_program_that_stops_before_the_limit_resumes(
    hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path, asked: str
) -> None:
    """The next job continues after run.should_stop() reported the time limit, but not after the user requested the
    stop.
    """
    slurm = idle_slurm
    (tmp_path / "stop.py").write_text(STOPPING)
    # In such a short job the signal means that the limit is near.
    limit = f"time_min={1 if asked == 'signal' else 10}"
    words = ["chain=2", limit, "nodes=2", "ranks_per_node=1", "stop.signal=USR1", "--", "stop.py"]
    folder = folder_of(submit(hpcinit, slurm, *words))
    ids = jobs(folder)
    # Otherwise, Slurm may send the signal while the second job's ranks still start.
    slurm.run("scontrol", "update", f"JobId={ids[1]}", "TimeLimit=10")
    until(lambda: (folder / "logs/rank-1.log").exists() and "up" in printed(folder, 1))
    (tmp_path / "finish").unlink(missing_ok=True)
    if asked == "signal":
        slurm.run("scancel", "--signal=USR1", ids[0])
    else:
        assert hpcinit("cancel", "--save", folder.name, env=slurm.env).returncode == 0
    until(lambda: states(slurm, ids)[0] == "COMPLETED")
    until(lambda: states(slurm, ids)[1] == ("RUNNING" if asked == "signal" else "COMPLETED"))
    (tmp_path / "finish").touch()
    until(lambda: states(slurm, ids)[1] == "COMPLETED")
    said = [line for line in printed(folder, 0).splitlines() if not line.startswith("[W")]  # torch, of host names
    assert said == (["up", "time limit", "up"] if asked == "signal" else ["up", "requested by the user"])
    assert status(hpcinit, slurm, folder)["job_id"] == (ids[1] if asked == "signal" else ids[0])


# A stand-in for sbatch with a site's limit on queued jobs, because this cluster has no accounting.
LIMIT = """#!/bin/sh
case "$*" in *--dependency*) n=$(cat "{count}" 2>/dev/null || echo 0); echo $((n + 1)) > "{count}"
if [ "$n" -ge 1 ]; then echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2; exit 1; fi;; esac
exec {sbatch} "$@"
"""


@pytest.mark.slurm
def test_an_incomplete_chain_is_reported(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """If sbatch refuses the third job, its message is shown, the first two stay, and the exit status is 1."""
    slurm = idle_slurm
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/sbatch"
    fake.write_text(LIMIT.format(count=tmp_path / "count", sbatch=shutil.which("sbatch")))
    fake.chmod(0o755)
    env = {**slurm.env, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    done = hpcinit("submit", "cluster=mini", "chain=4", "ranks_per_node=1", "--", "sleep", "300", env=env)
    assert done.returncode == 1
    ids = jobs(folder_of(done))
    assert len(ids) == 2 and f"chain: jobs {', '.join(ids)}, each starts after the previous one\n" in done.stdout
    assert done.stderr.startswith(
        "hpcinit: error: job 3 of a chain of 4 was not submitted: sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
    )
    assert (
        f"the jobs before it stay in the queue ({', '.join(ids)})" in done.stderr and "nothing was" not in done.stderr
    )
    assert states(slurm, ids)[1] == "PENDING"


def test_the_script_is_valid_bash(hpcinit: Run, tmp_path: Path) -> None:
    """bash and shellcheck accept the lines of a chain."""
    text = hpcinit("submit", "cluster=mini", "chain=2", "dry_run=true", "--", "true").stdout
    (tmp_path / "job.sh").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    subprocess.run([installed("shellcheck"), "--severity=warning", "--exclude=SC1090", tmp_path / "job.sh"], check=True)
