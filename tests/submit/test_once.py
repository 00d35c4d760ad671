"""One request is one job, even if the controller is stopped, restarted, killed or slowed by SIGSTOP.

On a real Slurm.
"""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcinit.base import console
from hpcinit.base.console import ProgressLine
from hpcinit.base.errors import MaybeSubmitted, NotReached, SubmitError
from hpcinit.records import job_record
from hpcinit.slurm import exactly_once, tokens
from hpcinit.slurm.sbatch import sbatch
from hpcinit.submit.executor import Executor
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.plugin import require_slurm
from tests.submitting import folder_of, job_id_of, submit

SCRIPT = "#!/bin/bash\n#SBATCH --begin=now+1hour\nsleep 60\n"  # stays in the queue, even after a restart


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniSlurm]:
    """Start a separate cluster, because its faults would disturb other tests."""
    require_slurm()
    # Slurm's clients time out after 3 s here instead of 10 s.
    with MiniSlurm(nodes=2, gpus=8, name=f"once-{os.getpid()}", options={"MessageTimeout": "3"}) as cluster:
        yield cluster


@pytest.fixture
def env(cluster: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    for key, value in cluster.env.items():
        monkeypatch.setenv(key, value)
    yield dict(os.environ)
    cluster.start_controller()
    cluster.cancel_all()


def script_in(folder: Path, text: str = SCRIPT) -> Path:
    path = folder / "job.sh"
    path.write_text(text)
    return path


def hand_over(
    script: Path, env: Mapping[str, str], token: str, options: Sequence[str] = (), **more: Any
) -> tuple[str, Sequence[str]]:
    """Submit as the command line does, with progress on stderr."""
    waiting = ProgressLine()
    try:
        return exactly_once.submit(script, env, token, options, show=waiting.show, **more)
    finally:
        waiting.end()


def jobs_with(cluster: MiniSlurm, token: str) -> list[str]:
    lines = cluster.run("squeue", "--noheader", "--states=all", "--format=%i|%T|%k").splitlines()
    return [line.split("|")[0] for line in lines if token in line and "CANCELLED" not in line]


@pytest.mark.slurm
def test_the_token_follows_the_users_comment(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """The job's comment is the user's text, then the token. Further options reach sbatch."""
    token = tokens.new("0123456789abcdef")
    assert re.fullmatch("0123456789ab-[0-9a-f]{8}", token)
    job_id, command = hand_over(script_in(tmp_path), env, token, ["--nice=7"], comment="mine | yours")
    assert command[:2] == ["sbatch", "--parsable"] and "--nice=7" in command
    assert (
        cluster.run("squeue", "--noheader", f"--jobs={job_id}", "--format=%k").strip()
        == f"mine | yours hpcinit={token}"
    )
    assert jobs_with(cluster, token) == [job_id]


@pytest.mark.slurm
@pytest.mark.parametrize("away_s", [1, 5, 10])
def test_a_controller_that_hangs_during_the_call(
    cluster: MiniSlurm, env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str], away_s: float
) -> None:
    """slurmctld is stopped with SIGSTOP while sbatch waits: there is one job, whether sbatch timed out (3 s) or not."""
    token = tokens.new()
    cluster.pause_controller()
    threading.Timer(away_s, cluster.resume_controller).start()
    job_id, _ = hand_over(script_in(tmp_path), env, token)
    time.sleep(1)
    assert jobs_with(cluster, token) == [job_id]
    assert ("hpcinit: " in capfd.readouterr().err) == (away_s > 3)


@pytest.mark.slurm
def test_an_array_while_the_controller_hangs(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """An array of functions whose sbatch timed out is one array, submitted by the executor of the same class."""
    executor = Executor(tmp_path / "jobs")
    executor.update_parameters(additional_parameters={"begin": "now+1hour"}, comment="mine")
    cluster.pause_controller()
    threading.Timer(5, cluster.resume_controller).start()
    jobs = executor.map_array(abs, [1, 2, 3])
    lines = cluster.run("squeue", "--noheader", "--states=all", "--array", "--format=%i|%k").splitlines()
    queued = [line.partition("|")[0] for line in lines if "|mine hpcinit=x-" in line]
    assert sorted(queued) == [job.job_id for job in jobs]
    assert {type(job) for job in jobs} == {Executor.job_class}


@pytest.mark.slurm
def test_a_controller_that_is_stopped_and_started(
    cluster: MiniSlurm, env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While slurmctld is down, the submission waits and reports it. When it is back, there is one job."""
    token = tokens.new()
    cluster.stop_controller()
    threading.Timer(12, cluster.start_controller).start()
    job_id, _ = hand_over(script_in(tmp_path), env, token)
    assert jobs_with(cluster, token) == [job_id]
    said = capfd.readouterr().err
    assert "Unable to contact slurm controller (connect failure); trying sbatch again; press Ctrl-C to give up" in said


@pytest.mark.slurm
def test_a_controller_that_is_killed_with_the_job_in_it(
    cluster: MiniSlurm, env: dict[str, str], tmp_path: Path
) -> None:
    """A job that the killed controller lost after printing its id is submitted again, with the same token."""
    hand_over(script_in(tmp_path), env, tokens.new())  # slurmctld saves now, and again in 5 s
    token = tokens.new()
    killer = threading.Timer(0.5, lambda: (cluster.kill_controller(), cluster.start_controller()))
    killer.start()
    job_id, _ = hand_over(script_in(tmp_path), env, token, confirm=True)
    killer.join()
    assert jobs_with(cluster, token) == [job_id]


@pytest.mark.slurm
def test_after_the_patience_the_state_is_unknown(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """If the controller hangs longer than the patience, the message names the token to look for."""
    token = tokens.new()
    cluster.pause_controller()
    try:
        with pytest.raises(MaybeSubmitted) as raised:
            hand_over(script_in(tmp_path), env, token, patience_s=1)
    finally:
        cluster.resume_controller()
    check = f"squeue --all --me --states=all --format '%i %T %k' | grep -F hpcinit={token}"
    assert f"Before you submit again, check with\n  {check}" in str(raised.value)
    assert "Socket timed out" in str(raised.value)
    assert "the controller did not accept the job within 1 s (cluster.submit_patience_s)" in str(raised.value)


@pytest.mark.slurm
def test_when_patience_is_over_and_nothing_was_sent(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """If the controller was down all the time, the error reports that there is no job."""
    cluster.stop_controller()
    with pytest.raises(SubmitError) as raised:
        hand_over(script_in(tmp_path), env, tokens.new(), patience_s=1)
    assert not isinstance(raised.value, MaybeSubmitted)
    assert "Unable to contact slurm controller (connect failure)" in str(raised.value)


@pytest.mark.slurm
def test_a_second_job_with_the_same_token_is_canceled(
    cluster: MiniSlurm, env: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that the controller created after every client timed out is canceled when it appears."""
    token, script = tokens.new(), script_in(tmp_path)
    first, _ = sbatch(script, env, [f"--comment=hpcinit={token}"])
    job_id, _ = hand_over(script, env, token, confirm=True)
    assert job_id == first and jobs_with(cluster, token) == [first]
    assert "the controller accepted the request twice" in capfd.readouterr().err


@pytest.mark.slurm
def test_the_same_request_is_submitted_once(hpcinit: Run, cluster: MiniSlurm, env: dict[str, str]) -> None:
    """A request that is already queued exits with status 2 and names job, state and folder. again=true submits it."""
    words = ["nodes=2", "+cluster.sbatch.begin=now+1hour", "--", "true"]
    first = submit(hpcinit, cluster, *words)
    done = submit(hpcinit, cluster, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert f"already queued as job {job_id_of(first)} (PENDING, run folder {folder_of(first)});" in done.stderr
    assert "again=true" in done.stderr and not (folder_of(first).parent / "true-0002").exists()
    assert submit(hpcinit, cluster, *words[:-1], "false").returncode == 0
    assert submit(hpcinit, cluster, "seed=1", *words).returncode == 0
    assert submit(hpcinit, cluster, "again=true", *words).returncode == 0
    assert submit(hpcinit, cluster, "again=true", "wait=false", *words).returncode == 0
    record = json.loads((folder_of(first) / "submission.json").read_text())
    assert jobs_with(cluster, record["token"]) == [record["job_id"]]


def read_until(process: subprocess.Popen[str], sign: str) -> None:
    """Read stderr up to the line with `sign`."""
    assert process.stderr is not None
    seen = ""
    while sign not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line


@pytest.mark.slurm
def test_ctrl_c_while_the_controller_is_down(
    hpcinit: Run, cluster: MiniSlurm, env: dict[str, str], tmp_path: Path
) -> None:
    """Ctrl-C during retries that never reached the controller: nothing was submitted, and no folder remains."""
    cluster.stop_controller()
    command = [sys.executable, "-m", "hpcinit", "submit", "cluster=mini", "--", "true"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    read_until(process, "trying sbatch again")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=150)
    assert process.returncode == 130 and "interrupted; nothing was submitted" in err
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.slurm
def test_ctrl_c_while_the_state_is_unknown(
    hpcinit: Run, cluster: MiniSlurm, env: dict[str, str], tmp_path: Path
) -> None:
    """After Ctrl-C during an attempt without an answer, the message names the token to look for."""
    cluster.pause_controller()
    command = [sys.executable, "-m", "hpcinit", "submit", "cluster=mini", "--", "true"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        read_until(process, "checking whether the controller has the job")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=150)
    finally:
        cluster.resume_controller()
    assert process.returncode == 130 and "interrupted; the job may exist anyway; the run folder was kept" in err
    assert "| grep -F hpcinit=" in err
    assert (tmp_path / "runs/true-0001/job.sh").exists()


@pytest.mark.parametrize(
    ("shell", "kind"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1", MaybeSubmitted),
        ("echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (receive failure)' >&2; exit 1", MaybeSubmitted),
        ("echo 'sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received' >&2; exit 1", MaybeSubmitted),
        ("echo 'sbatch: error: Batch job submission failed: Unexpected missing socket error' >&2; exit 1", MaybeSubmitted),
        ("kill -9 $$", MaybeSubmitted),
        ("echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2; exit 1", NotReached),
        ("echo 'sbatch: error: Batch job submission failed: Rate limit exceeded, please retry momentarily' >&2; exit 1", NotReached),
        ("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1", SubmitError),
    ],
)  # fmt: skip
def test_sbatchs_message_decides_whether_a_job_may_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, kind: type[SubmitError]
) -> None:
    """A stand-in prints texts that a real sbatch does not print on demand. Each text leads to its kind of error."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{shell}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SubmitError) as raised:
        sbatch(script_in(tmp_path), os.environ)
    assert type(raised.value) is kind


@pytest.mark.slurm
def test_a_purged_job_is_found_by_its_exit_record(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """A job that the controller has purged is found by its exit record, if only this submission used the script."""
    script = script_in(tmp_path)
    assert tokens.find(env, tokens.new(), script, [], alone=True) == []
    (tmp_path / "exit.json").write_text('{"job": "4242", "pid": 1, "restart": 0, "began": 5}\n')
    started = functools.partial(job_record.last_job, tmp_path)
    found = tokens.find(env, tokens.new(), script, [], True, started)
    assert found is not None and [job.job_id for job in found] == ["4242"]
    assert tokens.find(env, tokens.new(), script, [], False, started) == []


@pytest.mark.slurm
def test_a_site_that_writes_the_comment_itself(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """If a site's filter replaces the comment, the job is found by its script, which is unique."""
    script, token = script_in(tmp_path), tokens.new()
    job_id, _ = sbatch(script, env, ["--comment=the site's own"])
    for known, alone in (([], True), ([job_id], False)):
        found = tokens.find(env, token, script, known, alone)
        assert found is not None and [job.job_id for job in found] == [job_id]
    assert tokens.find(env, token, script, [], alone=False) == []
    assert tokens.find(env, token, tmp_path / "other.sh", [], alone=True) == []


@pytest.mark.slurm
def test_the_users_own_filters_hide_no_job(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """SQUEUE_* variables of the user do not hide a job."""
    script, token = script_in(tmp_path), tokens.new()
    job_id, _ = sbatch(script, env, [f"--comment=hpcinit={token}"])
    found = tokens.find({**env, "SQUEUE_PARTITION": "high", "SQUEUE_NAMES": "x"}, token, script, [], alone=False)
    assert found is not None and [job.job_id for job in found] == [job_id]


def stand_in(folder: Path, name: str, shell: str) -> None:
    """Create a program with this name in `folder` that runs `shell`."""
    (folder / name).write_text(f"#!/bin/bash\n{shell}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("echo $((41 + $(wc -l < calls)))", ["42", "43"]),
        ("echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1", []),
    ],
)
def test_there_is_no_third_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, named: list[str]
) -> None:
    """If Slurm shows no job after two attempts that may each have created one, there is no third.

    Stand-ins replace sbatch, squeue and scontrol, because the real ones do not hide a job.
    """
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "sbatch", f"echo called >> calls; {answer}")
    stand_in(tmp_path, "squeue", "true")
    stand_in(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(exactly_once, "SAVED_S", 0.1)
    monkeypatch.setattr(exactly_once, "SETTLE_S", 0.1)
    with pytest.raises(MaybeSubmitted) as raised:
        hand_over(script_in(tmp_path), os.environ, tokens.new(), patience_s=20, confirm=True)
    assert (tmp_path / "calls").read_text() == "called\n" * 2
    assert "2 calls of sbatch may each have created a job, but Slurm shows no such job; the job may exist" in str(
        raised.value
    )
    assert [f"scontrol show job {job_id}" for job_id in named] == re.findall(r"scontrol show .*", str(raised.value))


@pytest.mark.parametrize("late", [True, False])
def test_a_second_attempt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A late job of the first attempt fills the user's limit: it is found, or reported as possible.

    Stand-ins replace sbatch, squeue and scontrol, because the real controller is not late on demand.
    """
    monkeypatch.chdir(tmp_path)
    token = tokens.new()
    stand_in(
        tmp_path,
        "sbatch",
        "echo called >> calls; [ $(wc -l < calls) = 1 ] && { echo 'sbatch: error: Socket timed out' >&2; exit 1; }\n"
        "echo 'sbatch: error: Batch job submission failed: QOSMaxSubmitJobPerUserLimit' >&2; exit 1",
    )
    listed = rf"[ $(wc -l < calls) = 1 ] || printf '42\037PENDING\037N/A\0370:00\0371:00\037None\037{tmp_path}/job.sh\037hpcinit={token}\n'"
    stand_in(tmp_path, "squeue", listed if late else "true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SAVED_S", "SETTLE_S"):
        monkeypatch.setattr(exactly_once, name, 0.1)
    if late:
        assert hand_over(script_in(tmp_path), os.environ, token, patience_s=20)[0] == "42"
        return
    with pytest.raises(
        MaybeSubmitted, match="Slurm refused the job when sbatch was called again; the job may exist anyway"
    ):
        hand_over(script_in(tmp_path), os.environ, token, patience_s=20)


def test_an_error_after_sbatch_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an unexpected error, the message warns that the job may exist and names the token."""
    stand_in(tmp_path, "sbatch", "echo 'the filter prints hello' >&2; echo 42")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def fail(text: str) -> None:
        raise RuntimeError(f"cannot print {text}")

    monkeypatch.setattr(console, "note", fail)
    with pytest.raises(MaybeSubmitted) as raised:
        hand_over(script_in(tmp_path), os.environ, "x-1234")
    assert str(raised.value).startswith("RuntimeError: cannot print the filter prints hello\nthe job may exist anyway")
    assert "| grep -F hpcinit=x-1234" in str(raised.value)


@pytest.mark.slurm
def test_a_squeue_that_lists_too_little(cluster: MiniSlurm, env: dict[str, str], tmp_path: Path) -> None:
    """A job whose id sbatch printed is queried by its id if squeue does not list it.

    The stand-in is a site's squeue with a cache.
    """
    stand_in(tmp_path, "squeue", "true")
    token = tokens.new()
    path = f"{tmp_path}:{os.environ['PATH']}"
    job_id, _ = hand_over(script_in(tmp_path), {**env, "PATH": path}, token, patience_s=20, confirm=True)
    assert jobs_with(cluster, token) == [job_id]


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", []),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", None),
    ],
)
def test_a_controller_that_fails_between_two_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, known: list[str] | None
) -> None:
    """A job counts as purged only if scontrol reports it. Stand-ins fail on demand."""
    stand_in(tmp_path, "squeue", "true")
    stand_in(tmp_path, "sacct", "exit 1")
    stand_in(tmp_path, "scontrol", answer)
    path = f"{tmp_path}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    assert tokens.find({"PATH": path}, tokens.new(), tmp_path / "job.sh", ["42"], alone=False) == known


def test_no_squeue_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If squeue cannot run, the state of the job is unknown."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tokens.find({"PATH": str(tmp_path)}, tokens.new(), tmp_path / "job.sh", [], alone=True) is None


@pytest.mark.slurm
def test_with_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slurmdbd there is one job even if the controller hangs, and sacct finds the token of an ended job."""
    require_slurm(accounting=True)
    with MiniSlurm(nodes=1, gpus=8, accounting=True, name=f"once-db-{os.getpid()}") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        token = tokens.new()
        cluster.pause_controller()
        threading.Timer(12, cluster.resume_controller).start()
        job_id, _ = hand_over(script_in(tmp_path), os.environ, token)
        assert jobs_with(cluster, token) == [job_id]
        token = tokens.new()
        job_id, _ = hand_over(script_in(tmp_path, "#!/bin/bash\ntrue\n"), os.environ, token)
        deadline = time.monotonic() + 60
        while not (found := tokens._in_accounting(os.environ, token)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert [job.job_id for job in found] == [job_id]


def test_the_progress_line(tmp_path: Path) -> None:
    """Without a terminal each new message is a new line. In a terminal one line is updated."""
    code = (
        "from hpcinit.base.console import ProgressLine; w = ProgressLine()\n"
        "for text in ('one', 'one', 'two'): w.show(text)\n"
        "w.end()\n"
    )
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert plain == "hpcinit: one (0 s)\nhpcinit: two (0 s)\n"
    mine, its = pty.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=its, check=True)
    os.close(its)
    seen = os.read(mine, 10000).decode()
    assert seen == "\r\x1b[Khpcinit: one (0 s)" * 2 + "\r\x1b[Khpcinit: two (0 s)\r\n"


@pytest.mark.parametrize("sink", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_a_closed_terminal_ends_no_submission(sink: str) -> None:
    """If stderr fails, the submission continues, and stdout contains only its own output."""
    code = (
        "import time; from hpcinit.base.console import ProgressLine; w = ProgressLine(); time.sleep(0.3)\n"
        "for text in ('one', 'two'): w.show(text)\n"
        "w.end(); print('job 4242')"
    )
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" {sink}'], capture_output=True, text=True, check=False
    )
    assert done.stdout == "job 4242\n"


def test_cancel_after_a_killed_submitter(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """If hpcinit was killed between sbatch and its record, `hpcinit cancel RUN` prints how to find the job."""
    words = ["nodes=1", "ranks_per_node=1", "gpus_per_node=0", "+cluster.sbatch.begin=now+1hour"]
    done = submit(hpcinit, idle_slurm, *words, "--", "true")
    folder, job = folder_of(done), job_id_of(done)
    (folder / "submission.json").unlink()
    found = hpcinit("cancel", str(folder), env=idle_slurm.env)
    assert found.returncode == 2 and "hpcinit was killed during the submission" in found.stderr
    command = found.stderr.partition("To find the job: ")[2].partition(" ;")[0]
    listed = subprocess.run(["bash", "-c", command], env=idle_slurm.env, capture_output=True, text=True, check=True)
    assert listed.stdout.split()[:2] == [job, "PENDING"], listed.stdout
