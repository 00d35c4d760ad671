"""hpcinit.after on the real Slurm: on a slow file system, with SIGTERM, and when it cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcinit.base.quoting import Raw
from hpcinit.submit import shell_blocks
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import installed
from tests.submit.test_restart import finish, log, restarts, state
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

# Each Python that starts after the rank runs this first.
LATER = "echo 'import os, time; {}' > later/sitecustomize.py; echo up >> ups; exit {}"

SLOW = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void slow(void) { /* count this file, and wait */
    static int (*open_)(const char *, int, ...);
    if (!open_) open_ = dlsym(RTLD_NEXT, "open");
    int count = open_(getenv("COUNT"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (write(count, "x", 1) != 1) abort();
    close(count);
    usleep(50000);
}
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        static int (*real)(const char *, int, ...); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        slow(); return real(path, flags, mode); }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        static int (*real)(int, const char *, int, ...); \
        va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        slow(); return real(folder, path, flags, mode); }
#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        static FILE *(*real)(const char *, const char *); \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        slow(); return real(path, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)
"""


@pytest.mark.slurm
def test_on_a_slow_file_system(idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """With 50 ms for each file that Python and Slurm's commands open, a job is requeued in less than the 30 s that a
    preemption may leave."""
    slurm, run = idle_slurm, tmp_path / "run"
    (tmp_path / "slow.c").write_text(SLOW)
    shim = tmp_path / "slow.so"
    subprocess.run([installed("gcc"), "-shared", "-fPIC", "-o", shim, tmp_path / "slow.c", "-ldl"], check=True)
    job = slurm.run("sbatch", "--parsable", "--requeue", "--output=/dev/null", "--wrap=exec sleep 300").strip()
    until(lambda: state(slurm, job) == "RUNNING")
    (run / "logs").mkdir(parents=True)
    (run / "logs/job.log").write_text("srun: error: n1: task 0: Exited with exit code 7\n")
    (run / "progress.json").write_text('{"step": 41}')
    own = {"HPCINIT_RUN": str(run), "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    env = {**slurm.env, **own, "LD_PRELOAD": str(shim), "COUNT": str(tmp_path / "count")}
    words = ["143", f"job={job}", "on=failure", "max_restarts=1", "without_progress=2"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcinit.after", *words], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "requeued 7\n", done.stderr
    assert f"hpcinit: job {job} is requeued (failure): restart 1 of at most 1\n" in done.stderr
    assert restarts(run) == [(1, "failure", 41, 0)]
    until(lambda: state(slurm, job) == "PENDING")
    opened = (tmp_path / "count").stat().st_size
    assert 50 < opened < 400, "at 50 ms each, half of the 30 s are left"


@pytest.fixture
def later(tmp_path: Path) -> str:
    """Return an override with which Python imports a module that the rank writes."""
    (tmp_path / "later").mkdir()
    return f"+job.env.PYTHONPATH={tmp_path}/later"


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_it_cannot_start(hpcinit: Run, idle_slurm: MiniSlurm, later: str, tmp_path: Path) -> None:
    """Nothing is restarted, the next job of the chain runs nothing, and the log reports it."""
    slurm = idle_slurm
    restart = ["restart.max_restarts=3", "restart.on=[hang]", "chain=2"]
    words = ["ranks_per_node=1", later, *restart, "--", "sh", "-c", LATER.format("os._exit(1)", 76)]
    done = submit(hpcinit, slurm, *words)
    folder, job = folder_of(done), job_id_of(done)
    assert finish(slurm, job) == "FAILED"
    message = f" with {sys.executable}, so nothing is restarted\n"
    assert "hpcinit: error: hpcinit.after cannot start on n" in log(folder) and message in log(folder)
    second = json.loads((folder / "submission.json").read_text())["jobs"][1]
    assert finish(slurm, second) == "FAILED"
    assert f"hpcinit: job {job} of this chain failed with exit status 76, so job {second} runs nothing" in log(folder)
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == 76
    assert (tmp_path / "ups").read_text() == "up\n" and restarts(folder) == []


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_the_jobs_python_is_gone(hpcinit: Run, idle_slurm: MiniSlurm, tmp_path: Path) -> None:
    """Then the Python that submitted the job decides."""
    slurm, python = idle_slurm, tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    program = f'echo up >> ups; test -n "$SLURM_RESTART_COUNT" || {{ mv {python} gone; exit 76; }}'
    setup = f"cluster.setup=['test -e {python} || mv gone {python}']"
    words = ["ranks_per_node=1", f"cluster.python={python}", setup, "restart.max_restarts=1"]
    done = submit(hpcinit, slurm, *words, "--", "sh", "-c", program)
    assert finish(slurm, job_id_of(done)) == "COMPLETED", log(folder_of(done))
    assert (tmp_path / "ups").read_text() == "up\nup\n"
    assert [(number, why) for number, why, *_ in restarts(folder_of(done))] == [(1, "hang")]


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_scancel_while_it_runs(hpcinit: Run, later: str, tmp_path: Path) -> None:
    """The job ends at once with 143, as at any other time, and is not requeued."""
    stuck = 'os.system("touch stuck"); time.sleep(300)'
    words = ["ranks_per_node=1", later, "restart.max_restarts=3", "--", "sh", "-c", LATER.format(stuck, 76)]
    # On a busy machine, the script needs more than the other tests' 3 s until SIGKILL.
    with MiniSlurm(nodes=1, name=f"pytest-{os.getpid()}-patient", options={"KillWait": "60"}) as slurm:
        done = submit(hpcinit, slurm, *words)
        folder, job = folder_of(done), job_id_of(done)
        until((tmp_path / "stuck").exists)
        slurm.run("scancel", job)
        assert finish(slurm, job) == "CANCELLED"
        until(lambda: "exit_status" in json.loads((folder / "exit.json").read_text()))
    assert json.loads((folder / "exit.json").read_text())["exit_status"] == 143
    assert restarts(folder) == [] and "is requeued" not in log(folder) and "cannot start" not in log(folder)


def test_sigterm_to_the_script_alone(tmp_path: Path) -> None:
    """The script ends with 143 and does not wait for a Python that hangs, for example on a dead file server.

    The Python is a stand-in that hangs.
    """
    hangs = tmp_path / "python"
    hangs.write_text(f"#!/bin/sh\ntouch {tmp_path}/stuck; exec sleep 300\n")
    hangs.chmod(0o755)
    record = shell_blocks.block("record", {"hpcinit_job": "7"})
    values = {"hpcinit_pythons": Raw(f"({hangs})"), "hpcinit_policy": Raw("(max_restarts=0)")}
    after = shell_blocks.block("after", values)
    script = "\n".join([f"HPCINIT_RUN={tmp_path} SLURM_JOB_ID=7", *record, *after, "hpcinit_after 1"])
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    try:
        until((tmp_path / "stuck").exists)
        process.terminate()
        until(lambda: process.poll() is not None)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 143
    assert json.loads((tmp_path / "exit.json").read_text())["exit_status"] == 143
