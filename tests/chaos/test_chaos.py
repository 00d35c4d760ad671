"""Faults during training, on the real Slurm: the first line of `why`, the time until then, and the lost steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import outcomes
from tests.chaos.conftest import ALL
from tests.chaos.outcomes import Outcome
from tests.chaos.training import EVERY, Training, started
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.minislurm.daemons import daemon_pid
from tests.skip_or_fail import skip_or_fail
from tests.submit.test_restart import begin_now, log, restarts
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(400)]
short = pytest.mark.chaos(short=True)

Start = Callable[..., Training]


@pytest.fixture(params=["srun", "fork"])
def launch(request: pytest.FixtureRequest) -> str:
    """Each fault is tested with one rank on each of 2 nodes, and with two forked ranks."""
    return str(request.param)


@pytest.fixture
def start(hpcinit: Run, idle_slurm: MiniSlurm, launch: str) -> Start:
    return lambda *overrides, **options: started(hpcinit, idle_slurm, launch, *overrides, **options)


# The other ranks notice first that a rank is gone; Slurm notices the node failure some seconds later.
LOST = r"node n2 was lost|job \d+ waits \(\w+\)|a rank or its node disappeared without an error|(?:probably )?rank \d on n\d"


def kept(run: Training, fault: str, why: tuple[str, float], ends: str, first: str, expected: str) -> None:
    """Record the outcome for `make chaos`, then check the first line, the end, and that no process is left.

    RANK in `first` means the faulty rank.
    """
    if os.environ.get(ALL) == "1":
        outcomes.keep(Outcome(fault, run.launch, why[0], why[1], run.lost(), ends))
    assert re.match(first.replace("RANK", run.at_fault), why[0]), why
    assert re.fullmatch(expected, ends)
    until(lambda: not run.processes(), 60)


def test_a_rank_raises(start: Start) -> None:
    """The first line is the error of the rank with its step, not a secondary error."""
    run, since = start(), time.monotonic()
    Path("raise").touch()
    why = run.wait_for_why(since)
    ends = run.ends()
    kept(run, "a rank raises", why, ends, r"RANK failed first, .* ValueError: bad sample 17", "FAILED")
    assert run.lost() <= EVERY


def test_kill_9_of_a_rank(start: Start) -> None:
    """With restart.on=[failure], training continues from the last checkpoint."""
    run, since = start("restart.max_restarts=3", "restart.on=[failure]"), time.monotonic()
    os.kill(run.pid_at_fault(), signal.SIGKILL)
    why = run.wait_for_why(since)
    ends = run.ends(quick=True)
    first = r"RANK was killed by a signal \(Killed\) first|job \d+ waits \(BeginTime\)"
    kept(run, "`kill -9` of a rank", why, ends, first, "COMPLETED after 1 restart")
    assert run.lost() <= EVERY


def test_a_stopped_rank(start: Start) -> None:
    """After SIGSTOP, the hang is reported, and the job continues from its checkpoint."""
    run = start("hang.after_s=6", "hang.action=end", "restart.max_restarts=3")
    since = time.monotonic()
    os.kill(run.pid_at_fault(), signal.SIGSTOP)
    why = run.wait_for_why(since)
    ends = run.ends(quick=True)
    first = r"the training (hung|hangs): RANK|job \d+ waits"
    kept(run, "a rank is stopped (SIGSTOP)", why, ends, first, "COMPLETED after 1 restart")


def test_slurmd_is_killed(start: Start) -> None:
    """Slurm takes the job from a node whose slurmd is dead, and the job continues on other nodes."""
    run, since = start("restart.max_restarts=3"), time.monotonic()
    pid = daemon_pid(run.slurm.directory / "run/n2.pid", run.slurm.name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    try:
        why = run.wait_for_why(since)
        ends = run.ends(quick=True)
    finally:
        run.slurm.start_node("n2")
    kept(
        run,
        "a node's slurmd is killed",
        why,
        ends,
        LOST,
        "COMPLETED( after 1 restart)?",
    )


def test_a_node_loses_its_network(start: Start) -> None:
    """Slurm takes the job from an unreachable node, and the job continues on other nodes."""
    run, since = start("restart.max_restarts=3", "restart.on=[node_fail,failure]"), time.monotonic()
    run.slurm.network_down("n2")
    try:
        why = run.wait_for_why(since)
        ends = run.ends(quick=True)
    finally:
        run.slurm.network_up("n2")
    kept(
        run,
        "a node's network is cut",
        why,
        ends,
        LOST,
        "COMPLETED after 1 restart",
    )


def test_a_node_is_lost(start: Start) -> None:
    """After all processes of a node died without a record, the job continues on other nodes."""
    run, since = start("restart.max_restarts=3"), time.monotonic()
    run.slurm.kill_node("n2")
    try:
        why = run.wait_for_why(since)
        ends = run.ends(quick=True)
    finally:
        run.slurm.start_node("n2")
    kept(run, "a node is lost", why, ends, LOST, "COMPLETED after 1 restart")


def test_the_controller_is_away_for_a_minute(start: Start) -> None:
    """Training continues, and `why` reports that Slurm does not answer, not that the job failed."""
    run, since = start(), time.monotonic()
    before = run.steps()[-1]
    run.slurm.stop_controller()
    try:
        why = run.wait_for_why(since)
        time.sleep(max(0.0, 60 - (time.monotonic() - since)))
        assert run.steps()[-1] > before + 20
    finally:
        run.slurm.start_controller()
    until(lambda: run.why().startswith("the job is RUNNING: nothing has failed"), 60)
    (run.folder / "stop").touch()
    ends = run.ends()
    kept(
        run,
        "the controller is away for a minute",
        why,
        ends,
        "Slurm's controller does not answer",
        "COMPLETED",
    )
    assert run.lost() == 0


def test_preempted(start: Start) -> None:
    """A preempted job continues after the job of the partition `high`."""
    run, since = start("restart.max_restarts=3"), time.monotonic()
    high = run.slurm.run("sbatch", "--parsable", "-N4", "--exclusive", "--partition=high", "--wrap=sleep 5").strip()
    why = run.wait_for_why(since)
    until(
        lambda: run.slurm.run("squeue", "--noheader", f"--jobs={high}", "--states=R", "--format=%T").strip() == "", 60
    )
    ends = run.ends(quick=True)
    kept(
        run,
        "preempted by the partition high",
        why,
        ends,
        r"(job \d+ waits \(\w+\) to restart: )?(preempted|a job of higher priority took the nodes)",
        "COMPLETED after 1 restart",
    )


def test_the_time_limit(start: Start, hpcinit: Run) -> None:
    """Before the time limit, all ranks save at the same step, and the run is reported as stopped early.

    The seconds count from the last step.
    """
    run = start("time_min=1", "+cluster.sbatch.no-requeue=true")
    seen, since = run.steps()[-1], time.monotonic()
    while run.state == "RUNNING":
        if run.steps()[-1] != seen:
            seen, since = run.steps()[-1], time.monotonic()
        time.sleep(0.3)
    why = run.wait_for_why(since)
    kept(
        run,
        "the time limit",
        why,
        run.ends(),
        "nothing failed: training stopped before its end, time limit",
        "COMPLETED",
    )
    assert run.lost() == 0
    shown = hpcinit("status", run.folder.name, env=run.slurm.env).stdout
    assert "  stopped before its end: time limit" in shown, shown


def test_scancel(start: Start) -> None:
    """After scancel, the ranks get SIGTERM and save if there is enough time."""
    run, since = start(), time.monotonic()
    run.slurm.run("scancel", run.job)
    why = run.wait_for_why(since, lambda line: not re.match("the job is (RUNNING|COMPLETING)", line))
    kept(
        run,
        "`scancel`",
        why,
        run.ends(),
        r"the job was canceled|nothing failed: training stopped",
        "CANCELLED|COMPLETED",
    )
    assert run.lost() <= EVERY


MEMORY = Path("/sys/fs/cgroup/memory")  # version 1: Slurm limits no memory in this cluster, so the test does


@pytest.fixture
def confined() -> Iterator[Path]:
    place = MEMORY / f"hpcinit-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        skip_or_fail(f"a real OOM needs a cgroup of version 1 for memory: {error}")
    yield place
    until(lambda: not (place / "cgroup.procs").read_text().strip(), 30)
    place.rmdir()


def test_oom(start: Start, confined: Path) -> None:
    """After the kernel's OOM killer ended a rank, the report names the signal and advises to check memory.

    Slurm does not limit memory in this cluster, so it cannot report the cause.
    """
    run = start()
    (confined / "memory.limit_in_bytes").write_text(str(600 << 20))
    (confined / "cgroup.procs").write_text(str(run.pid_at_fault()))
    Path("eat").touch()
    since = time.monotonic()
    why = run.wait_for_why(since)
    ends = run.ends()
    kept(
        run,
        "out of memory (the kernel kills a rank; Slurm confines none here)",
        why,
        ends,
        r"RANK was (killed by a signal \(Killed\)|killed by the kernel)",
        "FAILED",
    )
    assert "mem_gb" in run.hpcinit("why", run.folder.name, env=run.slurm.env).stdout


@short
def test_the_clocks_of_two_nodes_differ(start: Start) -> None:
    """The report orders the errors correctly although the clock of the second node is 2 s ahead.

    A fake: the nodes share one clock, so only time.time() differs.
    """
    ahead = "import os, time\nif os.environ.get('SLURM_PROCID') == '1':\n    now = time.time; time.time = lambda: now() + 2\n"
    Path("sitecustomize.py").write_text(ahead)
    run = start(f"+job.env.PYTHONPATH={Path.cwd()}", "launch.kill_on_bad_exit=false")
    since = time.monotonic()
    Path("raise").touch()
    why = run.wait_for_why(since)
    ends = run.ends()
    output = run.hpcinit("why", run.folder.name, env=run.slurm.env).stdout
    kept(run, "clocks of the nodes 2 s apart (a rank raises)", why, ends, "RANK failed first", "FAILED")
    assert "ExitCode=1:0" in run.slurm.run("scontrol", "show", "job", run.job)
    assert re.search(r"clocks of the nodes differ by (1\.[89]|2\.\d) s \(n2 is ahead\)", output), output


@pytest.mark.chaos(short="srun")
def test_a_torn_checkpoint(start: Start) -> None:
    """A truncated checkpoint is skipped with a message, and training continues from the one before it."""
    run = start("restart.max_restarts=3", "restart.on=[failure]", total=60)
    os.kill(run.pid_at_fault(), signal.SIGSTOP)  # no newer checkpoint is written
    torn = max(run.saved.glob("step-*"))
    file = max((path for path in torn.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)
    since = time.monotonic()
    os.kill(run.pid_at_fault(), signal.SIGKILL)
    why = run.wait_for_why(since)
    ends = run.ends(quick=True)
    lost, first = run.lost(), r"RANK was killed by a signal|job \d+ waits"
    kept(run, "the newest checkpoint is torn, and a rank killed", why, ends, first, "COMPLETED after 1 restart")
    assert (
        f"checkpoint {torn} is skipped: " in (run.folder / "logs/rank-0.log").read_text() and EVERY <= lost <= 2 * EVERY
    )


def test_a_requeue_storm(start: Start) -> None:
    """restart.without_progress ends a job that is requeued repeatedly as soon as it runs."""
    run = start("restart.max_restarts=20")
    since, why = time.monotonic(), None
    while run.state not in ("FAILED", "COMPLETED"):
        if run.state == "RUNNING":
            run.slurm.run("scontrol", "requeue", run.job)
            until(lambda: run.state == "PENDING", 60)
            why = why or run.wait_for_why(since)
        elif run.state == "PENDING":
            begin_now(run.slurm, run.job)
            time.sleep(2)  # the batch script checks the budget when it starts
        assert time.monotonic() - since < 200
    assert why is not None
    last = run.why()
    ends = f"{run.state} at restart 3: `{last}`"
    kept(
        run,
        "requeue storm",
        why,
        ends,
        r"job \d+ waits",
        r"FAILED at restart 3: .* no restart 3 \(slurm\): 2 restarts in a row .*",
    )
    assert "no restart 3 (slurm): 2 restarts in a row made no progress beyond step" in log(run.folder)
    assert len(restarts(run.folder)) == 2


SLOW_DISK = (
    "import os, time\nreal = os.fsync\n"
    "def slow(file):\n    os.path.exists('slow') and time.sleep(10)\n    real(file)\nos.fsync = slow\n"
)


def test_the_file_system_becomes_slow(start: Start) -> None:
    """A save that takes more than 10 times hang.after_s is reported as a hang, and training continues after it.

    A fake: only os.fsync takes 10 s longer.
    """
    Path("sitecustomize.py").write_text(SLOW_DISK)
    run = start(f"+job.env.PYTHONPATH={Path.cwd()}", "hang.after_s=2")
    since = time.monotonic()
    Path("slow").touch()
    why = run.wait_for_why(since)
    Path("slow").unlink()
    ends = run.ends(quick=True)
    kept(
        run,
        "the file system becomes slow while saving",
        why,
        ends,
        "the training hung|the training hangs",
        "COMPLETED",
    )
    assert run.lost() == 0


@pytest.fixture
def full_disk(hpcinit: Run, tmp_path: Path) -> Iterator[tuple[Path, MiniSlurm]]:
    """A small file system that all nodes of a cluster can access: it is mounted before the cluster starts."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "hpcinit", place], check=True)
    try:
        with MiniSlurm(nodes=2, gpus=0, name=f"pytest-{os.getpid()}-disk") as slurm:
            yield place, slurm
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_the_disk_is_full(hpcinit: Run, full_disk: tuple[Path, MiniSlurm], launch: str) -> None:
    """On a full disk, no partial checkpoint is left, and the previous one still exists."""
    place, slurm = full_disk
    run = started(hpcinit, slurm, launch, saved=place / "checkpoints")
    since = time.monotonic()
    with (place / "other").open("wb") as other, pytest.raises(OSError, match="No space left"):
        while True:
            os.write(other.fileno(), bytes(4096))
    why = run.wait_for_why(since)
    ends = run.ends()
    kept(
        run,
        "the disk is full while saving",
        why,
        ends,
        r"rank \d on n\d failed first, .*cannot save step",
        "FAILED",
    )
    assert run.lost() <= EVERY and run.checkpoint() >= 2 * EVERY
