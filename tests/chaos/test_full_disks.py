"""A full disk in each phase of a run: training continues, or the message names the file that could not be saved.

The matrix uses cluster=local in a mount namespace with small disks; the rows of the chaos table use a real Slurm.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos import disk_table, outcomes
from tests.chaos.conftest import ALL
from tests.chaos.outcomes import BEGIN, DOCS, END, Outcome
from tests.chaos.training import RANKS_PER_NODE, Training, started
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.skip_or_fail import skip_or_fail
from tests.small_disks import fill, small_disk
from tests.submitting import folder_of, submit
from tests.waiting import until

CHECKOUT = Path(__file__).parents[2]
STEPS = 8
FILL = """
import sys
from pathlib import Path
def fill(place):
    for size in (1 << 20, 4096, 1):
        try:
            with (Path(place) / "other").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        except OSError:
            pass
if __name__ == "__main__":
    fill(sys.argv[1])
"""
# A disk that is filled before a phase is freed some steps later.
PROGRAM = """
import sys, time
from pathlib import Path
from fill import fill
place, phase = sys.argv[1:]
def at(name):
    if phase == name:
        fill(place)
def free():
    (Path(place) / "other").unlink(missing_ok=True)
at("during start-up")
import torch
import hpcinit
with hpcinit.session() as run:
    wrapped = run.wrap(torch.nn.Linear(64, 64), optimizer=lambda all: torch.optim.SGD(all, lr=0.001))
    at("before the first progress")
    for step in range(1, 9):
        wrapped.backward(wrapped(torch.ones(2, 64)).square().mean())
        wrapped.step()
        time.sleep(0.3)
        print("step", step, flush=True)
        run.progress(step, 8)
        run.should_stop()
        with open("steps", "a") as file:
            print(step, file=file)
        if step == 3: free()
        if step == 3: at("during steps")
        if step == 6: free()
        if step == 7: at("at a save")
        if step == 7: run.save(wrapped, run.folder / "checkpoints", step)
    at("at exit")
    run.result(0.25)
"""
# A small file system hides /tmp. What is needed of it is mounted again: the folders in $KEPT, one per line.
SMALL = """
set -e
mount -t tmpfs hpcinit /mnt
number=0
while IFS= read -r kept; do
    number=$((number + 1))
    mkdir "/mnt/$number"
    mount --bind "$kept" "/mnt/$number"
done << KEPT_FOLDERS
$KEPT
KEPT_FOLDERS
mount -t tmpfs -o size=96m,mode=1777 hpcinit /tmp
number=0
while IFS= read -r kept; do
    number=$((number + 1))
    mkdir -p "$kept"
    mount --bind "/mnt/$number" "$kept"
done << KEPT_FOLDERS
$KEPT
KEPT_FOLDERS
mount -t tmpfs -o size=96m hpcinit /dev/shm
for disk in runs scratch cache; do mount -t tmpfs -o size=96m hpcinit "$HERE/$disk"; done
cd "$HERE"
set +e
"$@"
status=$?
rm -f "$PLACE/other"
cp -a runs out
exit $status
"""
PHASES = (
    "before the ranks start",
    "during start-up",
    "before the first progress",
    "during steps",
    "at a save",
    "at exit",
)
# The purpose of each disk, and its folder in the test's folder.
DISKS = {
    "the run folder's": "runs",
    "the node's own (`cluster.local_disk`, `TMPDIR`)": "scratch",
    "`/tmp`, without `TMPDIR`": "/tmp",
    "`/dev/shm`": "/dev/shm",
    "caches (`XDG_CACHE_HOME`)": "cache",
}
QUICK = {
    ("runs", "during steps"),
    ("runs", "at exit"),
    ("scratch", "before the ranks start"),
    ("/tmp", "during start-up"),
}


@dataclass(frozen=True)
class Ended:
    """A finished run. steps: number of steps. output: the lines of its logs. folder: a copy of its run folder."""

    state: str
    exit_status: int
    steps: int
    output: tuple[str, ...]
    folder: Path

    @property
    def outcome(self) -> str:
        """Return a description for the table."""
        if self.state != "COMPLETED":
            error = next((line for line in self.output if "Error" in line or "error: " in line), "no message")
            return f"{self.state} after {self.steps} of {STEPS} steps: `{_short(error)}`"
        lines = [
            f"`{_short(line)}`" for line in self.output if line.startswith(("hpcinit: warning: ", "hpcinit: error: "))
        ]
        return "; ".join(["the training run completes", *dict.fromkeys(lines)])


def _short(line: str) -> str:
    """Remove parts that differ between runs or occur in every warning."""
    line = line.removeprefix("hpcinit: ").removesuffix("; the program continues, and hpcinit tries again")
    for pattern, text in (
        (r"/\S*/(runs|scratch|cache|tmp)/", r".../\1/"),
        (r"\d+ bytes", "N bytes"),
        (r"\[Errno \d+\] ", ""),
    ):
        line = re.sub(pattern, text, line)
    return line.replace(os.uname().nodename, "n1").replace("|", "/")


def trained(here: Path, disk: str, phase: str, ranks: int = 1) -> Ended:
    """Run the program until its end, with `disk` full at `phase`."""
    for name in ("runs", "scratch", "cache", "home"):
        (here / name).mkdir()
    (here / "fill.py").write_text(FILL)
    (here / "train.py").write_text(PROGRAM)
    place = disk if disk.startswith("/") else str(here / disk)
    overrides = ["cluster=local", "wait=true", "time_min=5", "hang.after_s=60", "name=full", f"ranks_per_node={ranks}"]
    if phase == PHASES[0]:
        overrides.append(f"cluster.setup=[{json.dumps(shlex.join([sys.executable, 'fill.py', place]))}]")
    env = {
        **os.environ,
        "HERE": str(here),
        # The checkout, its packages and Python may be below /tmp too.
        "KEPT": "\n".join(dict.fromkeys(map(str, (here, CHECKOUT, sys.prefix, sys.base_prefix)))),
        "PLACE": place,
        "HOME": str(here / "home"),
        "XDG_CACHE_HOME": str(here / "cache"),
    }
    env.pop("TMPDIR", None)
    if disk != "/tmp":
        env["TMPDIR"] = str(here / "scratch")
    command = [sys.executable, "-m", "hpcinit", "submit", *overrides, "--", "train.py", place, phase]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", SMALL, "sh", *command],
        env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    folder = here / "out/full-0001"
    assert folder.is_dir(), (done.stdout, done.stderr)
    logs = "".join(path.read_text() for path in sorted((folder / "logs").iterdir()))
    steps = (here / "steps").read_text().count("\n") if (here / "steps").exists() else 0
    end = json.loads((folder / "local.json").read_text())
    return Ended(end["state"], end["exit_status"], steps, tuple(logs.splitlines()), folder)


def _cases() -> Iterator[object]:
    for disk, place in DISKS.items():
        for phase in PHASES:
            marks = pytest.mark.chaos(short=(place, phase) in QUICK)
            yield pytest.param(disk, phase, id=f"{place}-{phase}", marks=marks)


@pytest.mark.parametrize(("disk", "phase"), list(_cases()))
def test_a_full_disk_does_not_end_training(disk: str, phase: str, tmp_path: Path) -> None:
    """The run succeeds with all steps; only a checkpoint that does not fit ends it, with a message."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: mounts file systems")
    ended = trained(tmp_path, DISKS[disk], phase)
    if os.environ.get(ALL) == "1":
        disk_table.keep(disk, phase, ended.outcome)
    output = "\n".join(ended.output)
    if (DISKS[disk], phase) == ("runs", "at a save"):
        assert (
            ended.state == "FAILED"
            and ended.exit_status == 1
            and "was not saved" in output
            and "No space left on device" in output
        ), output
        return
    assert (ended.state, ended.steps) == ("COMPLETED", STEPS), output
    if (DISKS[disk], phase) == ("runs", "at exit"):
        assert '{"value": 0.25}' in output or not (ended.folder / "result.json").exists()
    else:
        assert json.loads((ended.folder / "progress.json").read_text())["step"] == STEPS
        assert json.loads((ended.folder / "result.json").read_text()) == {"value": 0.25}
        assert list((ended.folder / "timeline").glob("*/*.jsonl"))
        assert list((ended.folder / "checkpoints").glob("step-*7"))
    assert output.count("hpcinit: warning: progress.json cannot be written") <= 1


def test_a_full_disk_at_a_save_is_a_failure(tmp_path: Path) -> None:
    """With several ranks, a save that fails ends the run with status 1, not with 143, which means: not finished."""
    if os.geteuid() != 0:
        skip_or_fail("needs root: mounts file systems")
    ended = trained(tmp_path, "runs", "at a save", ranks=2)
    assert (ended.state, ended.exit_status) == ("FAILED", 1), "\n".join(ended.output)


def test_the_page_shows_what_was_measured() -> None:
    """The table of docs/development/full-disks.md matches its JSON file, and contains every disk and phase."""
    known = json.loads((DOCS / disk_table.JSON).read_text())
    assert {disk: set(phases) for disk, phases in known.items()} == {disk: set(PHASES) for disk in DISKS}
    assert f"{BEGIN}\n{disk_table.table(known)}\n{END}" in (DOCS / disk_table.PAGE).read_text()


@pytest.fixture(params=["srun", "fork"])
def launch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kept(run: Training, fault: str, why: str, ends: str) -> None:
    """Record the outcome for `make chaos`, and check the end."""
    if os.environ.get(ALL) == "1":
        outcomes.keep(Outcome(fault, run.launch, why, None, run.lost(), ends))
    assert ends == "COMPLETED", why


@pytest.mark.slurm
@pytest.mark.timeout(400)
@pytest.mark.chaos(short="srun")
def test_tmp_is_full_when_training_starts(hpcinit: Run, idle_slurm: MiniSlurm, launch: str) -> None:
    """If another user filled a node's local disk, its ranks train without heartbeats and print one warning."""
    place = Path.cwd() / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "full", str(place)]
    subprocess.run(idle_slurm.inside("n2", mount), check=True)
    try:
        everything = f"head -c 1m /dev/zero > {place}/other 2> /dev/null || true"
        subprocess.run(idle_slurm.inside("n2", ["sh", "-c", everything]), check=True)
        run = started(hpcinit, idle_slurm, launch, f"cluster.local_disk={place}", total=30)
        ends = run.ends(quick=True)
    finally:
        subprocess.run(idle_slurm.inside("n2", ["umount", "--lazy", str(place)]), check=True)
    kept(run, "/tmp of a node is full when training starts", run.why(), ends)
    ranks = 2 * RANKS_PER_NODE[launch]
    for rank in range(ranks):
        text = (run.folder / f"logs/rank-{rank}.log").read_text()
        assert text.count("this rank's heartbeat cannot be written") == (rank >= ranks // 2), text


@pytest.fixture
def full_runs(tmp_path: Path) -> Iterator[tuple[Path, MiniSlurm]]:
    """A small disk for run folders. It is mounted before the cluster starts, so that all nodes can access it."""
    name = f"pytest-{os.getpid()}-runs"
    with small_disk(tmp_path / "disk", "size=32m") as place, MiniSlurm(nodes=2, gpus=0, name=name) as slurm:
        yield place, slurm


@pytest.mark.slurm
@pytest.mark.timeout(400)
@pytest.mark.chaos
def test_the_run_folder_is_full_while_training(
    hpcinit: Run, full_runs: tuple[Path, MiniSlurm], tmp_path: Path, launch: str
) -> None:
    """With a full run folder for 15 s, no rank fails, and the last step is recorded afterwards."""
    place, slurm = full_runs
    run = started(hpcinit, slurm, launch, f"runs_dir={place}", saved=tmp_path / "checkpoints", total=200)
    other, before = fill(place), run.checkpoint()
    time.sleep(15)
    why = hpcinit("why", str(run.folder), env=slurm.env).stdout.partition("\n")[0]
    assert run.checkpoint() > before, "no step was taken on the full disk"
    other.unlink()
    ends = run.ends(quick=True)
    kept(run, "the disk of the run folder is full for 15 s", why, ends)
    assert json.loads((run.folder / "progress.json").read_text())["step"] == 200


@pytest.mark.slurm
@pytest.mark.timeout(300)
@pytest.mark.chaos
def test_why_of_a_run_that_could_record_nothing(hpcinit: Run, full_runs: tuple[Path, MiniSlurm]) -> None:
    """The report of a program that failed on a full run folder, without a record, names the disk."""
    place, slurm = full_runs
    Path("train.py").write_text(FILL + f"    fill('{place}')\n    raise SystemExit(7)\n")
    shape = ["ranks_per_node=1", "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", f"runs_dir={place}"]
    folder = folder_of(submit(hpcinit, slurm, *shape, "--", "train.py", str(place)))
    run = Training(hpcinit, slurm, folder, folder)
    until(lambda: run.state == "FAILED", 100)
    output = hpcinit("why", str(folder), env=slurm.env).stdout
    assert "cannot be written (No space left on device)" in output and "free space for" in output, output
