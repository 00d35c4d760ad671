"""What the check of a node must not take for a leftover, as an ordinary user on a real Slurm: it ends and removes nothing.

Two jobs of one user share node n1. The second one runs the check and prints what it finds.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from hpcinit.node import leftovers
from hpcinit.slurm import queue, slurm_client
from tests import other_user
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.other_user import User
from tests.submit.test_restart import finish
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[1]
# Everything that the check prints about leftovers, at the end of a line with its own job.
CHECK = """
import json, os, sys, time
from hpcinit.node import leftovers, node_findings
from hpcinit.records.node_facts import Node
env = dict(os.environ, HPCINIT_ALLOCATED=str(time.time()))
processes, files = leftovers.find(env, 60)
checks = node_findings.node_findings(Node(processes=processes, files=files), (), (), 1)
found = [f"{check.detail}; {check.advice}" for check in checks]
print(json.dumps([os.environ["SLURM_JOB_ID"], found]), flush=True)
"""


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    require_slurm()
    with other_user.made(f"hpcinit-c{os.getpid()}", f"hpcinit-d{os.getpid()}") as user:
        # The user may not be able to read the checkout. The check needs no other package.
        shutil.copytree(ROOT / "hpcinit", user.home / "hpcinit", ignore=shutil.ignore_patterns("__pycache__"))
        yield user


@pytest.fixture(scope="module")
def cluster(user: User) -> Iterator[MiniSlurm]:
    """secret: squeue does not show its jobs, not even to their owner."""
    with MiniSlurm(nodes=2, gpus=0, name=f"harm-{os.getpid()}", partitions={"secret": "Hidden=YES"}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_jobs_left(cluster: MiniSlurm) -> Iterator[None]:
    yield
    cluster.cancel_all()


def sbatch(cluster: MiniSlurm, user: User, *words: str) -> str:
    """Submit as the user; return the job's id."""
    done = user.run("sbatch", "--parsable", "--output=job-%j.log", *words, env=cluster.env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def found_by_check(cluster: MiniSlurm, user: User) -> list[str]:
    """Run the check in a job on n1, and return its lines."""
    (user.home / "check.py").write_text(CHECK)
    job = sbatch(cluster, user, "-wn1", "--ntasks=1", f"--wrap=srun {user.python()} check.py")
    assert finish(cluster, job, 150) == "COMPLETED", (user.home / f"job-{job}.log").read_text()
    lines = (user.home / f"job-{job}.log").read_text().splitlines()
    found: list[str] = next(json.loads(line)[1] for line in lines if line.startswith("["))
    return found


def sleepers(job: str) -> list[int]:
    """Return the processes of the job that are `sleep`."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "comm").read_text() == "sleep\n" and f"SLURM_JOB_ID={job}\0" in (path / "environ").read_text():
                found.append(int(path.name))
    return found


RUNNING = {
    "in a hidden partition": ["--partition=secret", "-wn1", "--ntasks=1", "--wrap=srun sleep 600"],
    "of an array": ["--array=0-1", "-wn1", "--ntasks=1", "--wrap=srun sleep 600"],
    "in a step that overlaps": ["-wn1", "--ntasks=1", "--wrap=srun --overlap sleep 600 & srun --overlap sleep 600"],
}


@pytest.mark.parametrize("case", list(RUNNING))
def test_a_running_job_is_no_leftover(cluster: MiniSlurm, user: User, case: str) -> None:
    """Ranks of another running job of the user are neither reported nor touched."""
    job = sbatch(cluster, user, *RUNNING[case])
    until(lambda: sleepers(job) or any(sleepers(str(int(job) + number)) for number in (1, 2)))
    assert found_by_check(cluster, user) == []
    assert sleepers(job) or any(sleepers(str(int(job) + number)) for number in (1, 2))


def test_a_running_heterogeneous_job_is_no_leftover(cluster: MiniSlurm, user: User) -> None:
    """The ranks of a second component have the leader's id; the check sees that the job runs."""
    script = user.home / "het.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH -wn2 -n1\n#SBATCH hetjob\n#SBATCH -wn1 -n1\nexec srun --het-group=0,1 sleep 600\n"
    )
    leader = sbatch(cluster, user, str(script))
    until(lambda: len(sleepers(leader)) + len(sleepers(str(int(leader) + 1))) == 2)
    assert found_by_check(cluster, user) == []


def test_an_ended_job_s_process_is_reported_and_runs_on(cluster: MiniSlurm, user: User) -> None:
    """A process that outlives its job, as a tmux server does, is reported with the job's id, and is not ended."""
    outlives = f'{user.python()} -c "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"'
    job = sbatch(
        cluster, user, "-wn1", "--ntasks=1", f"--wrap=srun --output=none {outlives} < /dev/null > /dev/null 2>&1"
    )
    assert finish(cluster, job, 150) == "COMPLETED"
    (pid,) = (pid for pid in with_job(job))
    try:
        (line,) = found_by_check(cluster, user)
        assert line.startswith(f"process {pid} (") and f"of job {job}, which has ended, still runs" in line
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, 9)


def with_job(job: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"SLURM_JOB_ID={job}\0" in (path / "environ").read_text() and "600" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def test_tensors_of_a_program_outside_of_slurm_stay(cluster: MiniSlurm, user: User) -> None:
    """A file of torch that no process maps is not reported while its creator runs, and is never removed."""
    slurmd = (cluster.directory / "run/n1.pid").read_text().strip()
    shared = Path(f"/proc/{slurmd}/root/dev/shm")
    creator = subprocess.Popen(["sleep", "600"])
    ended = subprocess.Popen(["true"])
    ended.wait()
    files = [shared / f"torch_{process.pid}_1_1" for process in (creator, ended)]
    try:
        for path in files:
            path.write_bytes(bytes(4096))
            os.utime(path, (1, 1))
            os.chown(path, user.uid, user.gid)
        (line,) = found_by_check(cluster, user)
        assert f"(/dev/shm/{files[1].name}, " in line and "remove them if none of your programs" in line
        assert all(path.exists() for path in files)
    finally:
        creator.kill()
        creator.wait()
        for path in files:
            path.unlink(missing_ok=True)


def test_what_proves_the_end_of_a_job(cluster: MiniSlurm, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has ended in a final state only: not while it waits, runs or is requeued, and not if Slurm forgot it."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    limit = timedelta(seconds=30)
    job = sbatch(cluster, user, "--partition=secret", "-wn1", "--requeue", "--wrap=sleep 600")
    until(lambda: sleepers(job))
    assert queue.has_ended(job, limit) is False
    cluster.run("scontrol", "requeue", job)
    assert queue.has_ended(job, limit) is False
    cluster.run("scancel", job)
    until(lambda: queue.has_ended(job, limit))
    assert queue.has_ended("4000000", limit) is None


# Leaves a process behind that has the job's environment, and ends.
DAEMON = (
    "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    "[os.close(n) for n in (0, 1, 2)]; os.execvp('sleep', ['sleep', '600'])"
)


def test_a_process_that_outlived_its_step_in_a_running_allocation(cluster: MiniSlurm, user: User) -> None:
    """In an allocation of salloc without a step, what a step left behind is not reported: the allocation runs."""
    done = user.run("salloc", "--no-shell", "-wn1", "--ntasks=1", env=cluster.env)
    (job,) = re.findall(r"Granted job allocation (\d+)", done.stderr)
    step = user.run("srun", f"--jobid={job}", "--output=none", user.python(), "-c", DAEMON, env=cluster.env)
    assert step.returncode == 0, step.stderr
    until(lambda: sleepers(job))
    (pid,) = sleepers(job)
    try:
        assert found_by_check(cluster, user) == []
        assert Path(f"/proc/{pid}").exists()
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def queue_state(cluster: MiniSlurm, job: str) -> str:
    return re.findall(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", job))[0]


def test_an_array_with_one_ended_and_one_running_task(cluster: MiniSlurm, user: User) -> None:
    """Only what the ended task left behind is reported, if at all; ranks of the running task are not."""
    script = user.home / "array.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=0-1 -wn1 -n1\n"
        f'[ $SLURM_ARRAY_TASK_ID = 1 ] && exec srun sleep 600\nsrun --output=none {user.python()} -c "{DAEMON}"\n'
    )
    array = sbatch(cluster, user, str(script))
    ids = [array, str(int(array) + 1)]
    until(lambda: {"COMPLETED", "RUNNING"} == {queue_state_of_task(cluster, array, number) for number in (0, 1)})
    until(lambda: sum(len(sleepers(job)) for job in ids) == 2)
    before = {pid: job for job in ids for pid in sleepers(job)}
    try:
        lines = found_by_check(cluster, user)
        ended, *_ = re.findall(r"JobId=(\d+)", cluster.run("scontrol", "show", "job", f"{array}_0"))
        certain = {int(pid) for line in lines for pid in re.findall(r"process (\d+) .* which has ended", line)}
        assert certain <= {pid for pid, job in before.items() if job == ended}
        assert all(Path(f"/proc/{pid}").exists() for pid in before)
    finally:
        for pid in before:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def queue_state_of_task(cluster: MiniSlurm, array: str, number: int) -> str:
    return re.findall(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", f"{array}_{number}"))[0]


def test_a_step_that_was_started_from_an_ended_job(cluster: MiniSlurm, user: User) -> None:
    """`srun --overlap --jobid` of a running job, from the shell of a job that has ended since, is no leftover."""
    running = sbatch(cluster, user, "-wn1", "--ntasks=1", "--wrap=sleep 600")
    until(lambda: sleepers(running))
    inner = f"setsid srun --jobid={running} --overlap --ntasks=1 sleep 601 > /dev/null 2>&1 < /dev/null & sleep 2"
    ended = sbatch(cluster, user, "-wn2", "--ntasks=1", f"--wrap={inner}; exit 0")
    until(lambda: len(sleepers(running)) == 2)
    until(lambda: queue_state(cluster, ended) == "COMPLETED")
    assert found_by_check(cluster, user) == []


def test_an_environment_of_another_cluster(cluster: MiniSlurm, user: User) -> None:
    """A process whose environment differs only in the cluster's name or in SLURM_CONF is not reported."""
    ended = sbatch(cluster, user, "-wn1", "--ntasks=1", "--wrap=srun env -0 > other.env")
    assert finish(cluster, ended, 150) == "COMPLETED"
    env = dict(line.split("=", 1) for line in (user.home / "other.env").read_text().split("\0") if "=" in line)
    assert env["SLURM_JOB_ID"] == ended
    for change in ({"SLURM_CLUSTER_NAME": "other"}, {"SLURM_CONF": "/etc/other/slurm.conf"}):
        other = subprocess.Popen(cluster.inside("n1", user.command("sleep", "600")), env=env | change)
        try:
            until(lambda: sleepers(ended))
            assert found_by_check(cluster, user) == []
            assert other.poll() is None
        finally:
            other.kill()
            other.wait()


@pytest.mark.parametrize("down", ["stopped", "silent"])
def test_slurm_that_does_not_answer_the_check(cluster: MiniSlurm, user: User, down: str) -> None:
    """If the controller is down or silent while the check runs, it reports no process, not even a certain leftover."""
    ended = sbatch(
        cluster, user, "-wn1", "--ntasks=1", f'--wrap=srun --output=none {user.python()} -c "{DAEMON}" < /dev/null'
    )
    assert finish(cluster, ended, 150) == "COMPLETED"
    until(lambda: sleepers(ended))
    (pid,) = sleepers(ended)
    go, waits = user.home / "go", user.home / "waits"
    (user.home / "check.py").write_text(
        f"import time, pathlib\npathlib.Path('{waits}').touch()\n"
        f"while not pathlib.Path('{go}').exists(): time.sleep(0.1)\n" + CHECK.replace("60", "4")
    )
    try:
        job = sbatch(cluster, user, "-wn1", "--ntasks=1", f"--wrap=srun {user.python()} check.py")
        until(waits.exists)
        cluster.stop_controller() if down == "stopped" else cluster.pause_controller()
        go.touch()
        log = user.home / f"job-{job}.log"
        until(lambda: "[" in log.read_text())
        assert json.loads(next(line for line in log.read_text().splitlines() if line.startswith("[")))[1] == []
        assert Path(f"/proc/{pid}").exists()
    finally:
        cluster.resume_controller() if down == "silent" else cluster.start_controller()
        go.unlink(missing_ok=True)
        waits.unlink(missing_ok=True)
        os.kill(pid, 9)


def test_a_real_second_cluster_on_this_node(cluster: MiniSlurm, user: User) -> None:
    """A job of a second controller runs on a node of the same name, with the id of a job that has ended here."""
    ended = sbatch(cluster, user, "-wn1", "--ntasks=1", "--wrap=true")
    assert finish(cluster, ended, 150) == "COMPLETED"
    with MiniSlurm(nodes=1, gpus=0, name=f"harm-second-{os.getpid()}") as second:
        # Its node has its own network. Here the job enters that of n1, as if both daemons ran there.
        here = shlex.join(cluster.inside("n1", user.command("sleep", "600")))
        before = 0
        while before < int(ended) - 1:
            before = int(second.run("sbatch", "--parsable", "--hold", "--wrap=true"))
        job = second.run("sbatch", "--parsable", "-wn1", "--ntasks=1", f"--wrap=srun {here}").strip()
        assert job == ended
        until(lambda: sleepers(job))
        (pid,) = sleepers(job)
        assert found_by_check(cluster, user) == []
        assert pid in sleepers(job)
        second.cancel_all()


def test_a_truncated_answer_proves_no_end(cluster: MiniSlurm, user: User, tmp_path: Path) -> None:
    """Whatever part of its answer scontrol prints, and if it fails after it, only the whole answer shows that jobs ended."""
    script = user.home / "het.sh"
    script.write_text("#!/bin/bash\n#SBATCH -wn2 -n1\n#SBATCH hetjob\n#SBATCH -wn1 -n1\ntrue\n")
    leader = sbatch(cluster, user, str(script))
    until(lambda: queue_state(cluster, leader) == "COMPLETED")
    whole = cluster.run("scontrol", "--all", "show", "job", leader)
    assert whole.count("JobState=COMPLETED") == 2
    stand_in(tmp_path, "scontrol", 'cat "$ANSWER"; exit "$STATUS"')
    stand_in(tmp_path, "sacct", "echo COMPLETED")

    def found(text: str, status: int = 0) -> bool | None:
        (tmp_path / "answer").write_text(text)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ANSWER": f"{tmp_path}/answer", "STATUS": str(status)}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            with suppress(slurm_client.Unreachable):
                return queue.has_ended(leader, timedelta(seconds=30))
        return None

    assert found(whole) is True and found(whole, 1) is None
    cuts = [0, *(match.end() for match in re.finditer(r"\n", whole)), *range(3, len(whole), 61)]
    for cut in cuts:
        assert found(whole[:cut]) in (None, False) or cut == len(whole), whole[:cut]
    record = "JobId={} {}JobName=x\n   JobState=COMPLETED\n\n"
    assert found(record.format(leader, "")) is True
    assert found(record.format(int(leader) + 9, "")) is None, "an answer about another job"


def test_slow_commands_do_not_use_up_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands of Slurm together take at most half of the check's time, and without their answers nothing is
    reported about processes."""
    stand_in(
        tmp_path,
        "scontrol",
        f"echo >> {tmp_path}/calls; sleep 1.4; printf 'JobId=%s JobName=x\\n   JobState=COMPLETED\\n\\n' $4",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    task = {"SLURM_PROCID": "0", "SLURMD_NODENAME": f"n-{os.getpid()}", "SLURM_CLUSTER_NAME": "harm"}
    left = [
        subprocess.Popen(["sleep", "600"], env={**task, "PATH": "/bin", "SLURM_JOB_ID": str(job)})
        for job in range(91, 96)
    ]
    try:
        env = {**task, "SLURM_JOB_ID": "99"}
        assert len(list(leftovers._tasks(env))) == 5
        assert leftovers.find(env, 4.0)[0] == ()
        assert len((tmp_path / "calls").read_text()) <= 3
    finally:
        for process in left:
            process.kill()
            process.wait()


def stand_in(folder: Path, name: str, shell: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{shell}\n")
    (folder / name).chmod(0o755)
