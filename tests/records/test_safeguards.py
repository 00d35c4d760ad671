"""The safeguards of a run: the variables, their folder, and its removal after the run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcinit.records import scratch
from hpcinit.records.safeguards import CACHE_ROOM, CACHES, describe, safeguards
from tests.skip_or_fail import skip_or_fail
from tests.small_disks import small_disk

HOST = os.uname().nodename
CACHE_FOLDERS = Path("/c"), Path("/k")
# Applies the safeguards to its environment, prints what it set, and runs until its input ends.
RANK = """
import os, sys, json
from pathlib import Path
from hpcinit.records import safeguards
folder, *jobs = sys.argv[1:]
for job in jobs:
    names = safeguards.apply(os.environ, Path(folder) if folder else None, job)
    print(json.dumps([names, safeguards.describe(os.environ, names)]), flush=True)
sys.stdin.read()
"""


def rank(
    tmp: Path, *arguments: str, env: dict[str, str] | None = None, code: str = RANK, first: bool = True
) -> subprocess.Popen[str]:
    """Start a process with TMPDIR=tmp that applies the safeguards. first: wait for its first line."""
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp), **(env or {})}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    if first:
        assert process.stdout.readline()
    return process


def end(process: subprocess.Popen[str]) -> str:
    """Let the process end and return what else it printed."""
    assert process.stdin and process.stdout
    process.stdin.close()
    output = process.stdout.read()  # communicate() would lose what readline() has buffered
    assert process.wait(timeout=30) == 0
    return output


def below(tmp: Path) -> list[str]:
    """Return the names of the job folders, without those of dumps and of kernels."""
    base = tmp / f"hpcinit-{os.geteuid()}"
    return (
        sorted(path.name for path in base.iterdir() if not path.name.startswith(("flight", "kernels-")))
        if base.exists()
        else []
    )


def test_variables() -> None:
    """The recorder, error handling and two caches of kernels are set. torch's folder of extensions is left alone."""
    assert safeguards({}, CACHE_FOLDERS, "/d/7.rank_") == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": "/d/7.rank_",
        "TRITON_CACHE_DIR": "/k/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/k/inductor",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/c/flight_",
    }


@pytest.mark.parametrize(
    ("given", "left"),
    [(name, name) for name in safeguards({}, CACHE_FOLDERS, "/d/")]
    + [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TRITON_HOME", "TRITON_CACHE_DIR"),
    ],
)
@pytest.mark.parametrize("value", ["mine", ""])
def test_variables_of_the_user_are_kept(given: str, left: str, value: str) -> None:
    """A variable that the user has set, under any of its names and even to nothing, is not touched; the others are set."""
    everything = safeguards({}, CACHE_FOLDERS, "/d/")
    assert safeguards({given: value}, CACHE_FOLDERS, "/d/").keys() == everything.keys() - {left}


def test_without_folders() -> None:
    """Without a private folder and a folder for dumps, their variables are not set, and the line reports it."""
    found = safeguards({}, None, "")
    assert not found.keys() & {*CACHES, "TORCH_FR_DUMP_TEMP_FILE"} and "TORCH_NCCL_DUMP_ON_TIMEOUT" in found
    assert "kernel caches stay in their default folders: none of TMPDIR, /tmp and" in describe(found, tuple(found))


def test_the_line_shows_only_what_was_set(tmp_path: Path) -> None:
    """The log line shows the variables that were set, and neither names nor values of the user."""
    secret = {"TRITON_CACHE_DIR": "/secret/triton", "WANDB_API_KEY": "secret"}
    process = subprocess.run(
        [sys.executable, "-c", RANK, "", "7.0.0"],
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **secret},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"TORCHINDUCTOR_CACHE_DIR={tmp_path}/hpcinit-{os.geteuid()}/kernels-{HOST}/inductor" in process.stdout
    assert "secret" not in process.stdout and "TRITON" not in process.stdout and "KEY" not in process.stdout


def test_a_nearly_full_disk_is_not_used_for_caches(tmp_path: Path) -> None:
    """Caches use the next disk, because compilers would fail; heartbeats use it, because they need only a few bytes."""
    with small_disk(tmp_path / "disk", "size=1m") as place:
        mine = place / f"hpcinit-{os.geteuid()}"
        assert scratch.base({"TMPDIR": str(place)}) == mine
        assert scratch.base({"TMPDIR": str(place)}, CACHE_ROOM) != mine
        line = end(rank(place, "", "7.0.0", first=False))
    assert "TRITON_CACHE_DIR=" in line and f"TRITON_CACHE_DIR={place}" not in line


def test_once_for_each_process_and_job(tmp_path: Path) -> None:
    """A second call sets nothing, even for another job, and neither does a child process."""
    then = "os.execvpe('sh', ['sh', '-c', 'cat; exec \"$0\" -c \"$CODE\" \"\" 7.0.0', sys.executable], os.environ)"
    code = RANK.replace("sys.stdin.read()", then)
    process = rank(tmp_path, "", "7.0.0", "7.0.0", "8.0.0", code=code, env={"CODE": RANK})
    assert end(process).splitlines() == ['[[], ""]'] * 3


def test_a_job_within_a_job(tmp_path: Path) -> None:
    """A job that inherits the environment of another job replaces its variables, but keeps those of the user."""
    then = "os.execvpe('sh', ['sh', '-c', 'cat; exec \"$0\" -c \"$CODE\" \"\" 8.0.0', sys.executable], os.environ)"
    code = RANK.replace("sys.stdin.read()", then)
    line = end(rank(tmp_path, "", "7.0.0", code=code, env={"CODE": RANK, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}))
    assert f"/8.0.0-{HOST}/flight_" in line and "flight/8.0.0.rank_" in line
    assert "DUMP_ON_TIMEOUT" not in line and "7.0.0" not in line


def test_dumps_go_to_the_run_folder(tmp_path: Path) -> None:
    """With a submission, each start has its files of the recorder in a private folder of the run."""
    run = tmp_path / "run"
    run.mkdir()
    assert f"TORCH_FR_DUMP_TEMP_FILE={run}/flight/7.0.1.rank_" in end(rank(tmp_path, str(run), "7.0.1", first=False))
    assert (run / "flight").stat().st_mode & 0o777 == 0o700


def test_the_last_rank_removes_the_folder(tmp_path: Path) -> None:
    """The caches exist as long as a rank of the job runs on the node, and the last one removes them."""
    one, two = rank(tmp_path, "", "7.0.0"), rank(tmp_path, "", "7.0.0")
    (tmp_path / f"hpcinit-{os.geteuid()}" / f"7.0.0-{HOST}" / "triton").mkdir()
    end(one)
    assert below(tmp_path) == [f"7.0.0-{HOST}"]
    end(two)
    assert below(tmp_path) == []


def test_kernels_stay_after_the_job(tmp_path: Path) -> None:
    """A requeued job on the same node finds the kernels of its first start, also after SIGKILL, until two weeks without a
    job on the node have passed."""
    kept = tmp_path / f"hpcinit-{os.geteuid()}" / f"kernels-{HOST}"
    first = rank(tmp_path, "", "7.0.0")
    (kept / "triton").mkdir()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = end(rank(tmp_path, "", "7.0.1", first=False))
    assert f"TRITON_CACHE_DIR={kept}/triton" in second and (kept / "triton").is_dir()
    old = time.time() - scratch.KEPT_S - 60
    os.utime(kept, (old, old))
    end(rank(tmp_path, "", "8.0.0"))
    assert kept.is_dir() and not (kept / "triton").exists()


def test_the_next_start_removes_folders_of_killed_jobs(tmp_path: Path) -> None:
    """A start removes the folders of killed jobs, also partly removed ones, and keeps those of running jobs."""
    dead, alive = rank(tmp_path, "", "1.0.0"), rank(tmp_path, "", "2.0.0")
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    (tmp_path / f"hpcinit-{os.geteuid()}" / f".0.0.0-{HOST}.99.gone" / "triton").mkdir(parents=True)
    assert len(below(tmp_path)) == 3
    new = rank(tmp_path, "", "3.0.0")
    assert below(tmp_path) == [f"2.0.0-{HOST}", f"3.0.0-{HOST}"]
    end(new)
    end(alive)


def test_an_executed_command_keeps_the_folder(tmp_path: Path) -> None:
    """After exec the folder is still in use, and the next job on the node does not remove it."""
    code = RANK.replace("sys.stdin.read()", "os.execvp('cat', ['cat'])")
    command = rank(tmp_path, "", "1.0.0", code=code)
    end(rank(tmp_path, "", "2.0.0"))
    assert below(tmp_path) == [f"1.0.0-{HOST}"]
    end(command)
    end(rank(tmp_path, "", "3.0.0"))
    assert below(tmp_path) == []


@pytest.mark.parametrize("trap", ["open to others", "a link", "a file"])
def test_a_folder_that_others_could_fill_is_not_used(tmp_path: Path, trap: str) -> None:
    """A folder that others can enter, a link and a file are skipped for the next candidate."""
    mine = tmp_path / f"hpcinit-{os.geteuid()}"
    if trap == "open to others":
        mine.mkdir()
        mine.chmod(0o777)
    elif trap == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        mine.symlink_to(tmp_path / "elsewhere")
    else:
        mine.touch()
    found = scratch.base({"TMPDIR": str(tmp_path)})
    assert found in {Path(f"{parent}/hpcinit-{os.geteuid()}") for parent in ("/tmp", "/var/tmp")}


def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    """A private folder that belongs to another user is skipped."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: makes a folder of another user")
    mine = tmp_path / "hpcinit-0"
    mine.mkdir(mode=0o700)
    os.chown(mine, 12345, 12345)
    assert scratch.base({"TMPDIR": str(tmp_path)}) != mine


def test_a_disk_with_noexec_is_not_used(tmp_path: Path) -> None:
    """Compiled code could not be loaded from a mount with noexec, so the next candidate is used."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        skip_or_fail("needs root and unshare: mounts a file system")
    code = "from hpcinit.records import scratch; print(scratch.base({'TMPDIR': '%s'}))" % tmp_path  # noqa: UP031
    script = f'mount -t tmpfs -o %s none {tmp_path} && "{sys.executable}" -c "{code}"'
    for option, expected in [("exec", str(tmp_path)), ("noexec", "/tmp")]:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script % option], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"{expected}/hpcinit-"), done.stderr


def test_an_unwritable_run_folder_is_no_error(tmp_path: Path) -> None:
    """If the run folder cannot be written, dumps go to torch's default path, and the other variables are set."""
    (tmp_path / "run").touch()
    line = end(rank(tmp_path, str(tmp_path / "run"), "7.0.0", first=False))
    assert "TORCH_FR_DUMP_TEMP_FILE" not in line and "TRITON_CACHE_DIR" in line


@pytest.mark.parametrize(("job", "name"), [("7.0.1", "7.0.1"), ("n1:2/../x y", "n1-2-..-x-y"), ("", "job")])
def test_folder_names(job: str, name: str) -> None:
    """Any name of a job gives one valid folder name."""
    assert scratch.folder_name(job) == name
