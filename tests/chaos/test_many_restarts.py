"""A training run that is killed or preempted repeatedly has the same result as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.chaos import outcomes
from tests.chaos.conftest import ALL
from tests.chaos.training import RANKS_PER_NODE, Training
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import begin_now, log
from tests.submit.test_restart_training import ARGS, SLOW
from tests.submitting import folder_of, printed, submit
from tests.waiting import until

STEPS, EVERY = 200, 4
MODEL = ["--steps", str(STEPS), *ARGS[2:], "--save-every", str(EVERY)]  # ARGS with another number of steps
SHAPE = ["nodes=2", "job=train_gpt", f"job.args=[{','.join(MODEL)}]", "time_min=30"]


def wait_for_restart(run: Training) -> None:
    """Wait until the requeued job runs and has taken a step."""
    while run.state != "RUNNING":
        if run.state == "PENDING":
            begin_now(run.slurm, run.job)
        time.sleep(0.3)
    since = time.time()
    until(lambda: progress(run).get("time", 0) > since, 120)


def progress(run: Training) -> dict[str, float]:
    path = run.folder / "progress.json"
    return json.loads(path.read_text()) if path.exists() else {}


def kill(run: Training, drawn: random.Random) -> None:
    """Kill a random rank on any node."""
    ranks = run.ranks()
    assert len(ranks) == 2 * RANKS_PER_NODE[run.launch], ranks
    os.kill(drawn.choice(sorted(ranks)), signal.SIGKILL)


def preempt(run: Training, drawn: random.Random) -> None:
    run.slurm.run("sbatch", "-N4", "--exclusive", "--partition=high", "--wrap=true", "--output=/dev/null")


@pytest.mark.slurm
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("launch", "faults"),
    [
        pytest.param("srun", 3, marks=pytest.mark.chaos(short=True)),
        pytest.param("fork", 6, marks=pytest.mark.chaos),
        pytest.param("srun", 20, marks=pytest.mark.chaos),
    ],
)
def test_it_ends_with_the_same_loss(hpcinit: Run, idle_slurm: MiniSlurm, launch: str, faults: int) -> None:
    """After faults at random times, all losses equal those of the uninterrupted run to the last digit."""
    slurm, drawn = idle_slurm, random.Random(17)
    Path("sitecustomize.py").write_text(SLOW)
    shape = [f"launch={launch}", f"ranks_per_node={RANKS_PER_NODE[launch]}"]
    common = [*SHAPE, *shape, f"+job.env.PYTHONPATH={Path.cwd()}"]
    through = folder_of(submit(hpcinit, slurm, *common, "name=through", "wait=true", timeout=300))
    Path("slow").touch()
    restart = [f"restart.max_restarts={faults + 3}", "restart.on=[failure]", "restart.without_progress=null"]
    folder = folder_of(submit(hpcinit, slurm, *common, *restart))
    run, start, done = (
        Training(hpcinit, slurm, folder, folder / "checkpoints", launch),
        time.monotonic(),
        {"kill": 0, "preempt": 0},
    )
    for _ in range(faults):
        wait_for_restart(run)
        time.sleep(drawn.uniform(0, 4))
        how = drawn.choice([kill, preempt])
        how(run, drawn)
        done[how.__name__] += 1
        until(lambda: run.state == "PENDING", 60)
    wait_for_restart(run)
    Path("slow").unlink()
    ends = run.finish(300)
    assert ends == "COMPLETED", log(folder)
    last = printed(folder, 0).splitlines()[-1]
    restarts = [json.loads(line) for line in (folder / "restarts.jsonl").read_text().splitlines()]
    if os.environ.get(ALL) == "1" and faults == 20:
        fault = f"{done['kill']} x `kill -9`, {done['preempt']} x preempted, at random"
        same = "the same" if last == printed(through, 0).splitlines()[-1] else "DIFFERENT"
        ends = f"COMPLETED after {len(restarts)} restarts: {last}; uninterrupted run: {same}"
        outcomes.keep(outcomes.Outcome(fault, launch, run.why(), None, None, ends))
    assert last == printed(through, 0).splitlines()[-1]
    assert losses(folder) == losses(through) and len(restarts) == faults
    print(f"{faults} faults, {done}, {time.monotonic() - start:.0f} s: {last}")


def losses(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the output of each step without the speed; for a repeated step, that of the last attempt."""
    lines = [line.split() for line in printed(folder, 0).splitlines() if line.startswith("step ")]
    return {words[1]: tuple(words[2:6]) for words in lines}
