"""`make soak`: a training run on 4 nodes x 2 ranks of a real Slurm, with a random fault every few minutes.

It prints the time from each fault to the next new step, and the share of the time that was spent in steps that count.
Then it compares the losses of all ranks at every step with those of an undisturbed run, and looks for what is left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from hpcinit.records import elastic_restarts, requeues
from tests.chaos.training import Training
from tests.minislurm import MiniSlurm
from tests.minislurm.processes import command_name
from tests.submit.test_restart import begin_now, log
from tests.submitting import folder_of, submit
from tests.waiting import until

NODES, RANKS_PER_NODE, EVERY = 4, 2, 10
RANKS = NODES * RANKS_PER_NODE
PACE_S = 0.4  # of a step, so that the undisturbed run, which does not wait, is much faster
LIMIT_S = 300.0  # from a fault to the next new step
DISK_MB = 16
PARTITION = "soak"  # without a time limit
SPARE = "restarting the ranks in the same job"  # in the job's log, after srun has ended
# The input is from torch's generator, whose state is in the checkpoint. So a loss depends on all steps before it. The
# only parameter is alone in its bucket, so that DDP adds in the same order after a restart.
PROGRAM = """
import os, sys, time
import torch, hpcinit
total, pace_s, every, folder = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with hpcinit.session() as run:
    torch.manual_seed(17 + run.rank)
    wrapped = run.wrap(torch.nn.Linear(64, 64, bias=False), optimizer=lambda all: torch.optim.Adam(all, lr=0.001))
    loaded = run.load(wrapped, folder)
    for step in range(loaded.step + 1 if loaded else 1, total + 1):
        data = torch.randn(8, 64)
        loss = (wrapped(data) - data.flip(1)).square().mean()
        wrapped.backward(loss)
        wrapped.step()
        print("step", step, loss.item().hex(), f"{time.time():.3f}", os.getpid(), flush=True)
        run.progress(step, total)
        stop = run.should_stop()
        if stop or step % every == 0: run.save(wrapped, folder, step, keep=2)
        if stop: break
        time.sleep(pace_s)
"""


@dataclass(frozen=True)
class Line:
    """A step that a rank printed, with its loss and the time. start: the process, another one after a restart."""

    step: int
    loss: str
    time: float
    start: str


@dataclass
class Soak:
    """The run with its faults. outcomes: the kind of each fault, what followed, and the seconds to the next new step.

    disk: a small file system with the checkpoints. lost: nodes that the job has lost.
    """

    run: Training
    disk: Path
    drawn: random.Random
    outcomes: list[tuple[str, str, float]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    @property
    def filler(self) -> Path:
        """A file that fills the disk."""
        return self.disk / "filler"

    def lines(self, rank: int = 0, folder: Path | None = None) -> list[Line]:
        path = (folder or self.run.folder) / f"logs/rank-{rank}.log"
        found = re.findall(
            r"^step (\d+) (\S+) ([\d.]+) (\d+)$", path.read_text() if path.exists() else "", re.MULTILINE
        )
        return [Line(int(step), loss, float(when), start) for step, loss, when, start in found]

    def restarts(self) -> dict[str, int]:
        """Return how many restarts there were, by their kind."""
        folder = self.run.folder
        return {
            "warm": len(list(elastic_restarts.read(folder))),
            "srun again, without the node": log(folder).count(SPARE),
            "requeue": len(requeues.read(folder)),
        }

    def cause(self, kind: str) -> None:
        """Cause a fault, and wait for the next new step. Raise RuntimeError if it does not follow."""
        before, old, began = self.restarts(), self.lines()[-1].start, time.time()
        what, undo = FAULTS[kind](self)
        print(f"step {self.lines()[-1].step}: {kind}: {what}", flush=True)
        try:
            while (new := self.next_new_step(old)) is None:
                self._check(f"{kind} ({what})", began)
                if self.run.state == "PENDING":
                    begin_now(self.run.slurm, self.run.job)
                keep_full(self)
                time.sleep(0.2)
        finally:
            undo()
        how = ", ".join(name for name, count in self.restarts().items() if count > before[name])
        self.outcomes.append((kind, how, new.time - began))
        print(f"  {how}: {new.time - began:.1f} s to step {new.step}", flush=True)

    def next_new_step(self, old: str) -> Line | None:
        """Return the first step that no start computed before, of a start after `old`. None: there is none yet."""
        lines = self.lines()
        last = max(at for at, line in enumerate(lines) if line.start == old)
        furthest = max(line.step for line in lines[: last + 1])
        return next((line for line in lines[last + 1 :] if line.step > furthest), None)

    def _check(self, fault: str, began: float) -> None:
        state = self.run.state
        if time.time() > began + LIMIT_S or state not in ("RUNNING", "PENDING", "COMPLETING"):
            raise RuntimeError(f"no new step after {fault}: the job is {state}\n{log(self.run.folder)[-3000:]}")


# The faults: each returns what it did, and how to undo it.

Undo = Callable[[], None]


def nothing() -> None:
    pass


def ranks_of(soak: Soak, node: str) -> list[int]:
    return sorted(soak.run.ranks(node))


def draw_node(soak: Soak, but: str = "") -> str:
    """Return a node that has ranks."""
    return soak.drawn.choice([node for node in soak.run.nodes() if node != but and ranks_of(soak, node)])


def kill_a_rank(soak: Soak) -> tuple[str, Undo]:
    node = draw_node(soak)
    pid = soak.drawn.choice(ranks_of(soak, node))
    os.kill(pid, signal.SIGKILL)
    return f"process {pid} on {node}", nothing


def kill_the_ranks_of_a_node(soak: Soak) -> tuple[str, Undo]:
    node = draw_node(soak)
    for pid in ranks_of(soak, node):
        os.kill(pid, signal.SIGKILL)
    return node, nothing


def stop_a_rank(soak: Soak) -> tuple[str, Undo]:
    node = draw_node(soak)
    pid = soak.drawn.choice(ranks_of(soak, node))
    os.kill(pid, signal.SIGSTOP)
    return f"process {pid} on {node}", nothing


def fill_the_disk(soak: Soak) -> tuple[str, Undo]:
    soak.filler.touch()
    return str(soak.disk), lambda: soak.filler.unlink(missing_ok=True)


def keep_full(soak: Soak) -> None:
    """Fill the disk again, because the removal of old checkpoints frees a part, until a save has failed."""
    if not soak.filler.exists():
        return
    if any((soak.run.folder / "errors").glob("rank-*.json")):  # what follows is a restart, and not a second failure
        soak.filler.unlink(missing_ok=True)
        return
    with soak.filler.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def lose_a_node(soak: Soak) -> tuple[str, Undo]:
    """All processes of a node die. Not those of the first node, where the batch script runs: that ends the job."""
    node = draw_node(soak, but=soak.run.nodes()[0])
    soak.lost.add(node)
    soak.run.slurm.kill_node(node)

    def undo() -> None:
        """Start the node after Slurm has noticed, as it notices the boot of a real node: srun waits for its task."""
        if soak.run.slurm.node_states()[node].startswith(("alloc", "mix")):
            soak.run.slurm.give_up(node)
        soak.run.slurm.start_node(node)

    return node, undo


def lose_a_network(soak: Soak) -> tuple[str, Undo]:
    node = draw_node(soak, but=soak.run.nodes()[0])
    soak.lost.add(node)
    soak.run.slurm.network_down(node)
    return node, lambda: soak.run.slurm.network_up(node)


FAULTS: dict[str, Callable[[Soak], tuple[str, Undo]]] = {
    "kill -9 of a rank": kill_a_rank,
    "kill -9 of all ranks of a node": kill_the_ranks_of_a_node,
    "SIGSTOP of a rank": stop_a_rank,
    "full disk during a save": fill_the_disk,
    "a node is lost": lose_a_node,
    "a node loses its network": lose_a_network,
}


# --- the run


def hpcinit(*words: str, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpcinit", *words], env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def words(spare: int, time_min: int, tmp: Path) -> list[str]:
    return [
        f"nodes={NODES}", f"ranks_per_node={RANKS_PER_NODE}", f"spare_nodes={spare}", "parallel=ddp", "launch=fork",
        "cluster.gpus_per_node=0", "cluster.cpus_per_node=null", "cluster.partitions={}", f"partition={PARTITION}",
        f"time_min={time_min}", f"+job.env.TMPDIR={tmp}",
    ]  # fmt: skip


def start(slurm: MiniSlurm, disk: Path, tmp: Path, minutes: float, drawn: random.Random) -> Soak:
    survives = [
        "restart.warm=true", "restart.max_restarts=99", "restart.on=[node_fail,hang,failure]",
        "restart.without_progress=null", "hang.after_s=6", "hang.action=end",
        # Silence during a save is no hang before this limit. A rank was once stopped in the middle of a save.
        "comm.checkpoint_timeout_s=60", "name=soak",
    ]  # fmt: skip
    command = ["--", "train.py", str(10**9), str(PACE_S), str(EVERY), str(disk / "checkpoints")]
    done = submit(hpcinit, slurm, *words(1, int(minutes) + 60, tmp), *survives, *command)
    run = Training(hpcinit, slurm, folder_of(done), disk / "checkpoints", "fork")
    soak = Soak(run, disk, drawn)
    until(lambda: run.checkpoint() >= EVERY, LIMIT_S)
    return soak


def soak_for(soak: Soak, minutes: float, every_s: float, kinds: Sequence[str]) -> None:
    """Cause faults, each kind once before one of them again, then ask the run to save and stop."""
    end, due = time.monotonic() + 60 * minutes, time.monotonic()
    left: list[str] = []
    while (due := max(due + every_s, time.monotonic() + 10)) < end:
        time.sleep(due - time.monotonic() + soak.drawn.uniform(0, EVERY * PACE_S))
        left = left or soak.drawn.sample(kinds, len(kinds))
        soak.cause(left.pop())
    time.sleep(max(0.0, end - time.monotonic()))
    hpcinit("cancel", "--save", soak.run.folder.name, env=soak.run.slurm.env)
    ended = soak.run.finish()
    if ended != "COMPLETED":
        raise RuntimeError(f"the job ended as {ended}, expected COMPLETED\n{log(soak.run.folder)[-3000:]}")


# --- the results


def kept(lines: Sequence[Line]) -> list[Line]:
    """Return the steps that count: of each step, the last time that it was computed."""
    return list({line.step: line for line in lines}.values())


def step_s(lines: Sequence[Line]) -> float:
    """Return the seconds of the steps that count. The first step of a start is not in it: it includes the start-up."""
    final = {id(line) for line in kept(lines)}
    return sum(new.time - old.time for old, new in pairwise(lines) if new.start == old.start and id(new) in final)


def wrong_steps(soak: Soak, undisturbed: Path) -> Iterator[str]:
    """Yield where the steps or losses differ from those of the undisturbed run."""
    for rank in range(RANKS):
        lines, expected = soak.lines(rank), {line.step: line.loss for line in soak.lines(rank, undisturbed)}
        if sorted({line.step for line in lines}) != list(range(1, max(expected) + 1)):
            yield f"rank {rank}: steps are missing"
        wrong = [line.step for line in lines if line.loss != expected.get(line.step)]
        if wrong:
            yield f"rank {rank}: {len(wrong)} losses differ from the undisturbed run, the first at step {wrong[0]}"
        for old, new in pairwise(lines):
            after_save = new.start != old.start and new.step <= old.step + 1 and new.step % EVERY == 1
            if not after_save and (new.start != old.start or new.step != old.step + 1):
                yield f"rank {rank}: step {new.step} follows step {old.step}, expected the one after a checkpoint"


def left_behind(soak: Soak, tmp: Path) -> Iterator[str]:
    """Yield what the run has left. Compiled kernels stay on purpose, and so does what a lost node had in TMPDIR."""
    slurm = soak.run.slurm
    if found := soak.run.processes():
        yield f"processes are left: {found}"
    for node in slurm.nodes:
        if others := sorted({command_name(pid) for pid in slurm.pids(node)} - {"slurmd", "sleep"}):
            yield f"processes are left on {node}: {', '.join(others)}"
        shared = subprocess.run(
            slurm.inside(node, ["ls", "-A", "/dev/shm"]), capture_output=True, text=True, check=True
        )
        if shared.stdout:
            yield f"files are left in /dev/shm of {node}: {shared.stdout.split()}"
    names = [path.name for path in (*tmp.iterdir(), *tmp.glob("hpcinit-*/*")) if not path.match("hpcinit-*")]
    left = [name for name in names if not name.startswith("kernels-") and name.rpartition("-")[2] not in soak.lost]
    if left:
        yield f"files are left in TMPDIR: {sorted(left)[:20]}"


def summary(soak: Soak) -> Iterator[str]:
    """Yield the lines of the result."""
    lines = soak.lines()
    steps, took = kept(lines), lines[-1].time - lines[0].time
    yield f"{len(steps)} steps in {took / 60:.1f} min, {len(lines) - len(steps)} computed again"
    yield f"effective time: {100 * step_s(lines) / took:.1f} %"
    for kind, how in dict.fromkeys((kind, how) for kind, how, _ in soak.outcomes):
        seconds = [each for *what, each in soak.outcomes if what == [kind, how]]
        yield (
            f"{kind} ({how}): {len(seconds)} x, {statistics.median(seconds):.1f} s to the next new step, "
            f"at most {max(seconds):.1f} s"
        )


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mount a small file system. All nodes of a cluster that starts later can access it."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "hpcinit", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def _cluster() -> MiniSlurm:
    """One node more than the job, so that a requeued job does not need the lost node.

    slurmctld retries to end a job on a node that does not respond. If the job has restarted on this node by then, its
    new ranks end: seen on Slurm 22.05, 45 s after the requeue. Slurm itself waits two minutes before it starts the job.
    """
    return MiniSlurm(NODES + 2, gpus=0, name=f"soak-{os.getpid()}", partitions={PARTITION: "MaxTime=INFINITE"})


def run(work: Path, minutes: float, every_s: float, seed: int, kinds: Sequence[str]) -> list[str]:
    """Run in the empty folder `work`, which is the working directory. Print the results, and return what is wrong."""
    (work / "train.py").write_text(PROGRAM)
    (tmp := work / "tmp").mkdir()
    with small_disk(work / "disk") as disk, _cluster() as slurm:
        soak = start(slurm, disk, tmp, minutes, random.Random(seed))
        soak_for(soak, minutes, every_s, kinds)
        slurm.wait_idle()
        found = list(left_behind(soak, tmp))
        last = max(line.step for line in soak.lines())
        command = ["--", "train.py", str(last), "0", str(10**9), str(work / "none")]
        through = submit(hpcinit, slurm, *words(0, 60, tmp), "name=undisturbed", "wait=true", *command, timeout=3600)
        found += wrong_steps(soak, folder_of(through))
        print(*summary(soak), *(f"WRONG: {each}" for each in found), sep="\n", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--every", type=float, default=300, help="seconds between two faults (default: 300)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only these; default: all")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {options.seed}, folder {work}", flush=True)
    os.chdir(work)
    os.environ |= {"HOME": str(work), "OMP_NUM_THREADS": "1"}
    if run(work, options.minutes, options.every, options.seed, options.fault or [*FAULTS]):
        return 1
    shutil.rmtree(work)
    print("the losses of all ranks equal those of an undisturbed run at every step; nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
