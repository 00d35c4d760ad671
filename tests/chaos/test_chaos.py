"""Faults in the middle of a training, on the real Slurm: what the user reads first, when, and what is lost."""

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
from tests.leaving_out import leave_out
from tests.minislurm import MiniSlurm
from tests.minislurm.daemons import daemon_pid
from tests.submit.test_restart import begin_now, log, restarts
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(400)]
short = pytest.mark.chaos(short=True)

Start = Callable[..., Training]


@pytest.fixture(params=["srun", "fork"])
def launch(request: pytest.FixtureRequest) -> str:
    """Each fault with each of them: a rank on each of 2 nodes, or two that its parent has forked."""
    return str(request.param)


@pytest.fixture
def start(hpcinit: Run, idle_slurm: MiniSlurm, launch: str) -> Start:
    return lambda *words, **options: started(hpcinit, idle_slurm, launch, *words, **options)


# Peers notice first, and tell that somebody is gone; Slurm knows the node some seconds later.
LOST = r"node n2 was lost|job \d+ waits \(\w+\)|a rank or its node went away without a word|rank \d on n\d"


def kept(run: Training, fault: str, word: tuple[str, float], ends: str, first: str, expected: str) -> None:
    """Into the table, where it is asked for; and then the claims: the first line, how it ends, and that no process of
    the run is left on any node. RANK in `first` is the rank at fault."""
    if os.environ.get(ALL) == "1":
        outcomes.keep(Outcome(fault, run.launch, word[0], word[1], run.lost(), ends))
    assert re.match(first.replace("RANK", run.at_fault), word[0]), word
    assert re.fullmatch(expected, ends)
    until(lambda: not run.processes(), 60)


def test_a_rank_raises(start: Start) -> None:
    """The error and its step come first; the others' errors follow from it."""
    run, since = start(), time.monotonic()
    Path("raise").touch()
    word = run.word(since)
    ends = run.ends()
    kept(run, "a rank raises", word, ends, r"RANK failed first, .* ValueError: bad sample 17", "FAILED")
    assert run.lost() <= EVERY


def test_kill_9_of_a_rank(start: Start) -> None:
    """With restart.on=[failure] it goes on from the last checkpoint, whoever killed it."""
    run, since = start("restart.max_restarts=3", "restart.on=[failure]"), time.monotonic()
    os.kill(run.pid_at_fault(), signal.SIGKILL)
    word = run.word(since)
    ends = run.ends(quick=True)
    first = r"RANK was ended by a signal \(Killed\) first|job \d+ waits \(BeginTime\)"
    kept(run, "`kill -9` of a rank", word, ends, first, "COMPLETED after 1 restart")
    assert run.lost() <= EVERY


def test_a_stopped_rank(start: Start) -> None:
    """SIGSTOP: the hang is found and told, and the job goes on from its checkpoint."""
    run = start("hang.after_s=6", "hang.action=end", "restart.max_restarts=3")
    since = time.monotonic()
    os.kill(run.pid_at_fault(), signal.SIGSTOP)
    word = run.word(since)
    ends = run.ends(quick=True)
    first = r"the training (hung|hangs): RANK|job \d+ waits"
    kept(run, "a rank is stopped (SIGSTOP)", word, ends, first, "COMPLETED after 1 restart")


def test_slurmd_is_killed(start: Start) -> None:
    """The node goes down although its ranks are there; Slurm takes them, and the job goes on elsewhere."""
    run, since = start("restart.max_restarts=3"), time.monotonic()
    pid = daemon_pid(run.slurm.directory / "run/n2.pid", run.slurm.name)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    try:
        word = run.word(since)
        ends = run.ends(quick=True)
    finally:
        run.slurm.start_node("n2")
    kept(
        run,
        "a node's slurmd is killed",
        word,
        ends,
        LOST,
        "COMPLETED( after 1 restart)?",
    )


def test_a_node_loses_its_network(start: Start) -> None:
    """Nobody gets an answer from it: the job is taken from it, and goes on on the others."""
    run, since = start("restart.max_restarts=3", "restart.on=[node_fail,failure]"), time.monotonic()
    run.slurm.network_down("n2")
    try:
        word = run.word(since)
        ends = run.ends(quick=True)
    finally:
        run.slurm.network_up("n2")
    kept(
        run,
        "a node's network is cut",
        word,
        ends,
        LOST,
        "COMPLETED after 1 restart",
    )


def test_a_node_is_lost(start: Start) -> None:
    """All that runs on it ends at once, and nobody reports anything."""
    run, since = start("restart.max_restarts=3"), time.monotonic()
    run.slurm.kill_node("n2")
    try:
        word = run.word(since)
        ends = run.ends(quick=True)
    finally:
        run.slurm.start_node("n2")
    kept(run, "a node is lost", word, ends, LOST, "COMPLETED after 1 restart")


def test_the_controller_is_away_for_a_minute(start: Start) -> None:
    """The training does not notice; the report says that Slurm gives no answer, and never that the job has failed."""
    run, since = start(), time.monotonic()
    before = run.steps()[-1]
    run.slurm.stop_controller()
    try:
        word = run.word(since)
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
        word,
        ends,
        "Slurm's controller does not answer",
        "COMPLETED",
    )
    assert run.lost() == 0


def test_preempted(start: Start) -> None:
    """A job of the partition high takes the nodes."""
    run, since = start("restart.max_restarts=3"), time.monotonic()
    high = run.slurm.run("sbatch", "--parsable", "-N4", "--exclusive", "--partition=high", "--wrap=sleep 5").strip()
    word = run.word(since)
    until(
        lambda: run.slurm.run("squeue", "--noheader", f"--jobs={high}", "--states=R", "--format=%T").strip() == "", 60
    )
    ends = run.ends(quick=True)
    kept(
        run,
        "preempted by the partition high",
        word,
        ends,
        r"(job \d+ waits \(\w+\) to begin again: )?(preempted|a job of higher priority took the nodes)",
        "COMPLETED after 1 restart",
    )


def test_the_time_limit(start: Start, hpcinit: Run) -> None:
    """All ranks save before it, at one step, and the training says that it is not done. Seconds: from its last step."""
    run = start("time_min=1", "+cluster.sbatch.no-requeue=true")
    seen, since = run.steps()[-1], time.monotonic()
    while run.state == "RUNNING":
        if run.steps()[-1] != seen:
            seen, since = run.steps()[-1], time.monotonic()
        time.sleep(0.3)
    word = run.word(since)
    kept(
        run,
        "the time limit",
        word,
        run.ends(),
        "nothing failed: the training stopped before its end, time limit",
        "COMPLETED",
    )
    assert run.lost() == 0
    shown = hpcinit("status", run.folder.name, env=run.slurm.env).stdout
    assert shown.rstrip().endswith("  stopped before its end: time limit"), shown


def test_scancel(start: Start) -> None:
    """SIGTERM reaches the ranks first, which save in what time they have."""
    run, since = start(), time.monotonic()
    run.slurm.run("scancel", run.job)
    word = run.word(since, lambda line: not re.match("the job is (RUNNING|COMPLETING)", line))
    kept(
        run,
        "`scancel`",
        word,
        run.ends(),
        r"the job was cancelled|nothing failed: the training stopped",
        "CANCELLED|COMPLETED",
    )
    assert run.lost() <= EVERY


MEMORY = Path("/sys/fs/cgroup/memory")  # version 1: this cluster's Slurm confines no memory, so the test does


@pytest.fixture
def confined() -> Iterator[Path]:
    place = MEMORY / f"hpcinit-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        leave_out(f"a real OOM needs a cgroup of version 1 for memory: {error}")
    yield place
    until(lambda: not (place / "cgroup.procs").read_text().strip(), 30)
    place.rmdir()


def test_oom(start: Start, confined: Path) -> None:
    """The kernel's OOM killer ends a rank. Slurm does not confine memory here and cannot tell of it, so the report says
    that a signal ended the rank, and names memory as what to look at."""
    run = start()
    (confined / "memory.limit_in_bytes").write_text(str(600 << 20))
    (confined / "cgroup.procs").write_text(str(run.pid_at_fault()))
    Path("eat").touch()
    since = time.monotonic()
    word = run.word(since)
    ends = run.ends()
    kept(
        run,
        "out of memory (the kernel kills a rank; Slurm confines none here)",
        word,
        ends,
        r"RANK was (ended by a signal \(Killed\)|killed by the kernel)",
        "FAILED",
    )
    assert "mem_gb" in run.hpcinit("why", run.folder.name, env=run.slurm.env).stdout


@short
def test_the_clocks_of_two_nodes_differ(start: Start) -> None:
    """The second node's clock is 2 s ahead (a stand-in: time.time alone, as all clocks here are one): the report puts
    the errors in the right order all the same."""
    ahead = "import os, time\nif os.environ.get('SLURM_PROCID') == '1':\n    now = time.time; time.time = lambda: now() + 2\n"
    Path("sitecustomize.py").write_text(ahead)
    run = start(f"+job.env.PYTHONPATH={Path.cwd()}", "launch.kill_on_bad_exit=false")
    since = time.monotonic()
    Path("raise").touch()
    word = run.word(since)
    ends = run.ends()
    said = run.hpcinit("why", run.folder.name, env=run.slurm.env).stdout
    kept(run, "clocks of the nodes 2 s apart (a rank raises)", word, ends, "RANK failed first", "FAILED")
    assert "ExitCode=1:0" in run.slurm.run("scontrol", "show", "job", run.job)
    assert re.search(r"clocks of the nodes differ by (1\.[89]|2\.\d) s \(n2 is ahead\)", said), said


@pytest.mark.chaos(short="srun")
def test_a_torn_checkpoint(start: Start) -> None:
    """The newest has lost the end of a file: it is skipped with a line, and the one before is gone on from."""
    run = start("restart.max_restarts=3", "restart.on=[failure]", total=60)
    os.kill(run.pid_at_fault(), signal.SIGSTOP)  # nothing newer is written
    torn = max(run.saved.glob("step-*"))
    file = max((path for path in torn.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(file, file.stat().st_size - 1)
    since = time.monotonic()
    os.kill(run.pid_at_fault(), signal.SIGKILL)
    word = run.word(since)
    ends = run.ends(quick=True)
    lost, first = run.lost(), r"RANK was ended by a signal|job \d+ waits"
    kept(run, "the newest checkpoint is torn, and a rank killed", word, ends, first, "COMPLETED after 1 restart")
    assert (
        f"checkpoint {torn} is skipped: " in (run.folder / "logs/rank-0.log").read_text() and EVERY < lost <= 2 * EVERY
    )


def test_a_requeue_storm(start: Start) -> None:
    """The job is requeued again and again as soon as it runs: restart.without_progress ends that."""
    run = start("restart.max_restarts=20")
    since, word = time.monotonic(), None
    while run.state not in ("FAILED", "COMPLETED"):
        if run.state == "RUNNING":
            run.slurm.run("scontrol", "requeue", run.job)
            until(lambda: run.state == "PENDING", 60)
            word = word or run.word(since)
        elif run.state == "PENDING":
            begin_now(run.slurm, run.job)
            time.sleep(2)  # its batch script looks at the budget as it begins
        assert time.monotonic() - since < 200
    assert word is not None
    last = run.why()
    ends = f"{run.state} at restart 3: `{last}`"
    kept(
        run,
        "requeue storm",
        word,
        ends,
        r"job \d+ waits",
        r"FAILED at restart 3: .* restart 3 \(slurm\) is not begun: 2 in a row .*",
    )
    assert "restart 3 (slurm) is not begun: 2 in a row have come no further than step" in log(run.folder)
    assert len(restarts(run.folder)) == 2


SLOW_DISK = (
    "import os, time\nreal = os.fsync\n"
    "def slow(file):\n    os.path.exists('slow') and time.sleep(10)\n    real(file)\nos.fsync = slow\n"
)


def test_the_file_system_becomes_slow(start: Start) -> None:
    """Every fsync takes 10 s more (a stand-in: os.fsync alone). A save of more than 10 times hang.after_s is reported as
    a hang, with where the ranks are, and with hang.action=report the training goes on when the disk does."""
    Path("sitecustomize.py").write_text(SLOW_DISK)
    run = start(f"+job.env.PYTHONPATH={Path.cwd()}", "hang.after_s=2")
    since = time.monotonic()
    Path("slow").touch()
    word = run.word(since)
    Path("slow").unlink()
    ends = run.ends(quick=True)
    kept(
        run,
        "the file system becomes slow while saving",
        word,
        ends,
        "the training hung|the training hangs",
        "COMPLETED",
    )
    assert run.lost() == 0


@pytest.fixture
def full_disk(hpcinit: Run, tmp_path: Path) -> Iterator[tuple[Path, MiniSlurm]]:
    """A small file system of its own, that all nodes of a cluster see: mounted before they are made."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "hpcinit", place], check=True)
    try:
        with MiniSlurm(nodes=2, gpus=0, name=f"pytest-{os.getpid()}-disk") as slurm:
            yield place, slurm
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_the_disk_is_full(hpcinit: Run, full_disk: tuple[Path, MiniSlurm], launch: str) -> None:
    """A checkpoint that could not be written whole is not there, and the one before it is."""
    place, slurm = full_disk
    run = started(hpcinit, slurm, launch, saved=place / "checkpoints")
    since = time.monotonic()
    with (place / "other").open("wb") as other, pytest.raises(OSError, match="No space left"):
        while True:
            os.write(other.fileno(), bytes(4096))
    word = run.word(since)
    ends = run.ends()
    kept(
        run,
        "the disk is full while saving",
        word,
        ends,
        r"rank \d on n\d failed first, .*was not saved in",
        "FAILED",
    )
    assert run.lost() <= EVERY and run.checkpoint() >= 2 * EVERY
