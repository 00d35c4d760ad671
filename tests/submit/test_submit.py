"""`hpcinit submit` without a cluster: its output, files and errors."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.submitting import scripts_of

NO_SLURM = {"PATH": f"{Path(sys.executable).parent}:/nowhere"}


def test_dry_run_needs_no_slurm_and_touches_nothing(hpcinit: Run, tmp_path: Path) -> None:
    """dry_run prints only the script on stdout, works without Slurm on PATH, and writes no file."""
    done = hpcinit("submit", "cluster=mini", "nodes=4", "dry_run=true", env=NO_SLURM)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n") and "srun --nodes=4" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_is_byte_for_byte_what_is_written(hpcinit: Run, tmp_path: Path) -> None:
    """The script in the run folder is exactly the output of the dry run."""
    words = ["submit", "nodes=2", "--", "true", "an argument"]
    printed = scripts_of(hpcinit(*words[:2], "dry_run=true", *words[2:]).stdout)
    assert hpcinit(*words).returncode == 0
    assert (tmp_path / "runs/true-0001/job.sh").read_text() == printed


def test_the_run_folder_is_complete(hpcinit: Run, tmp_path: Path) -> None:
    """The private folder contains config, script, spec, versions and commit, and no pickle."""
    assert hpcinit("submit", "wait=true", "--", "true").returncode == 0
    folder = tmp_path / "runs/true-0001"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.rglob("*.pkl"))
    spec = json.loads((folder / "spec.json").read_text())
    assert spec["program"] == {"kind": "command", "target": "true", "args": []} and len(spec["nonce"]) == 32
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["command"] == ["hpcinit", "submit", "wait=true", "--", "true"]
    assert {"hpcinit", "torch", "submitit"} <= set(provenance["versions"])
    assert "command: 'true'" in (folder / "config.yaml").read_text()


def test_git_commit_is_recorded(hpcinit: Run, tmp_path: Path) -> None:
    """The commit of the checkout is recorded, with a mark if it has edits."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x.invalid"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "a.py").write_text("")
    subprocess.run([*git, "add", "a.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    hpcinit("submit", "--", "true")
    (tmp_path / "a.py").write_text("edited")
    hpcinit("submit", "--", "true")
    found = [json.loads((tmp_path / f"runs/true-000{i}/provenance.json").read_text())["git_commit"] for i in (1, 2)]
    assert found == [commit, f"{commit}-dirty"]


def test_run_again_manually(hpcinit: Run, tmp_path: Path) -> None:
    """A rank needs only the run folder's spec: hpcinit run SPEC."""
    hpcinit("submit", "wait=true", "--", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"')
    done = hpcinit("run", "runs/sh-0001/spec.json")
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1\n")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["cluster=nope"], 2, "no such cluster, expected one of: aws_p5_efa, clariden, "),
        (["nodes=0"], 2, "nodes is 0, expected 1 or more"),
        (["nodes=-1"], 2, "nodes is -1, expected 1 or more"),
        (["nodes=abc"], 2, "nodes=abc: expected a whole number"),
        (["cluster=mini", "nodes=5"], 2, "partition 'main' of cluster mini allows at most 4"),
        (["cluster=mini"], 1, "sbatch is not on PATH, but cluster mini needs it"),
        (["nodes=1", "--", "nope.py"], 2, "nope.py does not exist\n"),
        (["comment='a\nb'"], 2, "contains the control character '\\n'"),
        (["comment='a\0b'"], 2, "contains the control character '\\x00'"),
        (['comment="it\'s"'], 2, "contains an unbalanced '"),
        (["runs_dir=/proc/nowhere"], 1, "cannot write the run folder /proc/nowhere"),
        (["ranks_per_node=1000"], 2, "this machine has"),
        (["nodes=500"], 2, "cluster=local has at most 254"),
        (["cluster.setup=[\"echo 'open\"]"], 2, "bash: line"),
        (["--", "./nope"], 2, "job.command is './nope', expected an executable file"),
        (["--frob"], 2, "--frob: no such option, expected key=value"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_message_and_leaves_nothing(
    hpcinit: Run, tmp_path: Path, words: list[str], status: int, message: str
) -> None:
    """Bad input leads to a message on stderr, nothing on stdout, the right exit status, no traceback and no folder."""
    if any("\0" in word for word in words):
        # An argument cannot contain a NUL, but a YAML file can.
        (tmp_path / "conf/job").mkdir(parents=True)
        (tmp_path / "conf/job/nul.yaml").write_text('name: nul\nmodule: x\nenv: {A: "a\\0b"}\n')
        words = ["job=nul"]
    done = hpcinit("submit", *words, env=NO_SLURM)
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists() or list((tmp_path / "runs").iterdir()) == []


def test_command_line_mistakes_are_guessed(hpcinit: Run) -> None:
    """For a mistyped command the message shows the likeliest one."""
    done = hpcinit("submitt")
    assert done.returncode == 2 and "did you mean 'submit'?" in done.stderr


def interrupt(process: subprocess.Popen[str], after: str) -> tuple[str, str]:
    """Send SIGINT once `after` appears on stdout, as a terminal does on Ctrl-C. Return stdout and stderr."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if after in line:
            break
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=150)
    return seen + out, err


def test_ctrl_c_stops_waiting_but_not_the_job(hpcinit: Run, tmp_path: Path) -> None:
    """Ctrl-C stops the waiting, shows how to find the job, and the job completes."""
    command = [sys.executable, "-m", "hpcinit", "submit", "wait=true", "--", "sh", "-c", "sleep 3; echo done"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, _ = interrupt(process, "RUNNING")
    assert process.returncode == 130 and f"hpcinit status {tmp_path}/runs/sh-0001" in out
    assert "RUNNING" in hpcinit("status", "sh-0001").stdout
    assert "done" in hpcinit("logs", "--follow", "sh-0001").stdout
    assert "COMPLETED" in hpcinit("status", "sh-0001").stdout


SLOW = """#!/bin/sh
# A stand-in for {name} that is slow, so that Ctrl-C arrives while it runs.
case "$*" in *--test-only*) exit 0 ;; esac
echo x > {name}-was-called
sleep 2
echo 4242
"""


@pytest.mark.parametrize(
    ("slow", "said"),
    [("git", "nothing was submitted"), ("sbatch", "the job was already submitted; to cancel it: hpcinit cancel")],
)
def test_interrupted_while_submitting(tmp_path: Path, hpcinit: Run, slow: str, said: str) -> None:
    """Ctrl-C before sbatch leaves no files. During sbatch, the new job is recorded and shown."""
    (tmp_path / "bin").mkdir()
    for name in {slow, "sbatch"}:
        (tmp_path / "bin" / name).write_text(SLOW.format(name=name))
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "hpcinit", "submit", "cluster=mini", "--", "true"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not (tmp_path / f"{slow}-was-called").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 130 and said in err and "Traceback" not in err
    submitted = slow == "sbatch"
    assert ((tmp_path / "runs/true-0001/submission.json").exists(), "job 4242" in out) == (submitted, submitted)
    assert (tmp_path / "sbatch-was-called").exists() == submitted


def fake_sbatch(tmp_path: Path, shell: str) -> dict[str, str]:
    """Create an sbatch that runs `shell`, because a real one does not fail on demand."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f'#!/bin/sh\ncase "$*" in *--test-only*) exit 0 ;; esac\n{shell}\n')
    (tmp_path / "bin/sbatch").chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_an_answer_without_a_job_id_keeps_the_folder(hpcinit: Run, tmp_path: Path) -> None:
    """If sbatch's answer cannot be read, the job may exist: the folder stays, and the message shows how to check."""
    env = fake_sbatch(tmp_path, "echo Submitted batch job 77 on cluster x")
    done = hpcinit("submit", "cluster=mini", "cluster.submit_patience_s=1", "--", "true", env=env)
    assert done.returncode == 1 and "expected a job id on the last line" in done.stderr
    assert "the job may exist anyway" in done.stderr and "nothing was submitted" not in done.stderr
    assert (tmp_path / "runs/true-0001/job.sh").exists()


@pytest.mark.parametrize(
    ("answer", "job_id"), [("4242", "4242"), ("4242;federation", "4242"), ("Welcome!\n4242", "4242")]
)
def test_job_ids_as_sbatch_prints_them(hpcinit: Run, tmp_path: Path, answer: str, job_id: str) -> None:
    """A plain id, an id with its cluster, and an id below a banner are read."""
    done = hpcinit("submit", "cluster=mini", "--", "true", env=fake_sbatch(tmp_path, f"printf '{answer}\\n'"))
    assert f"job {job_id} on mini" in done.stdout


def test_a_record_that_cannot_be_written_loses_no_job(hpcinit: Run, tmp_path: Path) -> None:
    """If the disk is full after sbatch accepted the job, the error shows its id, and its folder stays."""
    env = fake_sbatch(tmp_path, "mkdir runs/true-0001/submission.json.$PPID.tmp; echo 4242")
    done = hpcinit("submit", "cluster=mini", "--", "true", env=env)
    assert done.returncode == 1 and "job 4242 was submitted and will run, but " in done.stderr
    assert "scancel 4242" in done.stderr and (tmp_path / "runs/true-0001/job.sh").exists()


def test_nothing_after_the_dashes(hpcinit: Run, tmp_path: Path) -> None:
    """`hpcinit submit --` is refused and does not run the smoke test instead."""
    done = hpcinit("submit", "--")
    assert done.returncode == 2 and "no program after --" in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("sink", [">/dev/full", ">&-", "| true"])
def test_a_job_id_is_not_lost_with_stdout(tmp_path: Path, sink: str) -> None:
    """If stdout fails, the job id is printed on stderr."""
    code = "import time; time.sleep(0.2); from hpcinit.submit.messages import print_reliably as p; p('job 4242'); p('folder x')"
    command = f'set -o pipefail; "{sys.executable}" -c "{code}" {sink}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "job 4242\nfolder x\n")


def test_a_name_that_no_folder_can_have(hpcinit: Run, tmp_path: Path) -> None:
    """A name that is too long for a file system is refused before any file is written."""
    done = hpcinit("submit", f"name={'a' * 300}", "--", "true")
    assert done.returncode == 2 and "name has 300 characters, expected at most 240" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_longest_name_works(hpcinit: Run) -> None:
    """The longest accepted name makes a run folder and a job."""
    assert hpcinit("submit", f"name={'a' * 240}", "wait=true", "--", "true").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_loses_no_job(hpcinit: Run, tmp_path: Path, number: signal.Signals) -> None:
    """After SIGTERM or SIGHUP while sbatch runs, the new job is recorded."""
    env = {**os.environ, **fake_sbatch(tmp_path, "touch called; sleep 1; echo 4242")}
    command = [sys.executable, "-m", "hpcinit", "submit", "cluster=mini", "--", "true"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while not (tmp_path / "called").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, _ = process.communicate(timeout=150)
    assert (
        "job 4242" in out and json.loads((tmp_path / "runs/true-0001/submission.json").read_text())["job_id"] == "4242"
    )


def test_ctrl_c_of_a_whole_terminal_while_waiting(hpcinit: Run, tmp_path: Path) -> None:
    """Ctrl-C signals the terminal's process group. The job is in another one and continues."""
    command = [
        sys.executable,
        "-m",
        "hpcinit",
        "submit",
        "wait=true",
        "--",
        "sh",
        "-c",
        "echo here; sleep 2; echo done",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    while "here" not in process.stdout.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=150)
    assert process.returncode == 130 and "stopped waiting; the job is still running" in out
    assert "done" in hpcinit("logs", "--follow", "sh-0001").stdout


def test_an_sbatch_that_was_killed_may_have_submitted(hpcinit: Run, tmp_path: Path) -> None:
    """If a signal ends sbatch, the job may exist, and the folder stays."""
    words = ["submit", "cluster=mini", "cluster.submit_patience_s=1", "--", "true"]
    done = hpcinit(*words, env=fake_sbatch(tmp_path, "kill -9 $$"))
    assert done.returncode == 1 and "the job may exist anyway" in done.stderr
    assert (tmp_path / "runs/true-0001/job.sh").exists()


def test_sbatchs_messages_about_an_accepted_job(hpcinit: Run, tmp_path: Path) -> None:
    """The message of a site's submit filter is shown although the job was accepted."""
    env = fake_sbatch(tmp_path, "echo 'sbatch: lua: moved to partition long' >&2; echo 4242")
    done = hpcinit("submit", "cluster=mini", "--", "true", env=env)
    assert done.returncode == 0 and "sbatch: lua: moved to partition long" in done.stderr


def test_an_sbatch_that_cannot_be_run(hpcinit: Run, tmp_path: Path) -> None:
    """If sbatch cannot be executed, the message names it and reports that nothing was submitted."""
    env = fake_sbatch(tmp_path, "")
    (tmp_path / "bin/sbatch").write_bytes(b"\x7fELF not really")
    done = hpcinit("submit", "cluster=mini", "--", "true", env={**env, "PATH": f"{tmp_path}/bin"})
    assert done.returncode == 1 and "cannot run sbatch: Exec format error" in done.stderr
    assert "nothing was submitted" in done.stderr and not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("words", [("submit", "--", "true"), ("run", "x.py")])
def test_a_deleted_working_folder(
    hpcinit: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """If the working folder was deleted, the message reports it."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = hpcinit(*words)
    monkeypatch.chdir(tmp_path)
    assert done.returncode == 2 and "the current folder was deleted" in done.stderr


def test_a_spec_of_another_size(hpcinit: Run, tmp_path: Path) -> None:
    """A single rank of a run of two starts, with a warning that names both sizes."""
    hpcinit("submit", "nodes=2", "wait=true", "--", "sh", "-c", "echo $RANK/$WORLD_SIZE")
    done = hpcinit("run", "runs/sh-0001/spec.json")
    assert (done.returncode, done.stdout) == (0, "0/1\n")
    assert "single started 1 rank, but runs/sh-0001/spec.json is for 2 nodes x 1 rank = 2" in done.stderr
    assert f"to start all ranks: {tmp_path}/runs/sh-0001/job.sh" in done.stderr
