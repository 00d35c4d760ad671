"""A run with DataLoader workers saves after each request to stop, for every way to start ranks and workers."""

from __future__ import annotations

import collections
import datetime
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcinit.records.job_record import exit_status
from tests.chaos.conftest import ALL
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submitting import folder_of, job_id_of, submit
from tests.waiting import until

PROGRAM = """
import sys, time
import torch
import hpcinit

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(64)

def main():
    method, persistent = sys.argv[1], sys.argv[2] == "True"
    with hpcinit.session() as run:
        wrapped = run.wrap(torch.nn.Linear(64, 64), optimizer=lambda all: torch.optim.SGD(all, lr=0.001))
        loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, persistent_workers=persistent,
            multiprocessing_context=method, **run.loader_options())
        for step, batch in enumerate(loader, 1):
            wrapped.backward(wrapped(batch).square().mean())
            wrapped.step()
            time.sleep(0.05)
            print("step", step, flush=True)
            if stop := run.should_stop():
                run.save(wrapped, run.folder / "checkpoints", step)
                print(f"saved step {step}: {stop.reason}", flush=True)
                break

if __name__ == "__main__":
    main()
"""
METHODS = ("fork", "spawn", "forkserver")
Ask = Callable[[Run, MiniSlurm, Path, str], object]


def _command(*words: str) -> Ask:
    return lambda hpcinit, slurm, folder, job: slurm.run(*words, job)


def _hpcinit(*words: str) -> Ask:
    return lambda hpcinit, slurm, folder, job: hpcinit(*words, folder.name, env=slurm.env)


def _preempt(hpcinit: Run, slurm: MiniSlurm, folder: Path, job: str) -> None:
    slurm.run("sbatch", "-N2", "--exclusive", "--partition=high", "--output=/dev/null", "--wrap=true")


# The way to stop the run -> the function, and the reason that the ranks print.
ASKS: dict[str, tuple[Ask, str]] = {
    "scancel --signal=TERM": (_command("scancel", "--signal=TERM"), "terminated by SIGTERM"),
    "preemption": (_preempt, "preempted"),
    "scancel": (_command("scancel"), "terminated by SIGTERM"),
    "hpcinit cancel": (_hpcinit("cancel"), "terminated by SIGTERM"),
    "hpcinit cancel --save": (_hpcinit("cancel", "--save"), "requested by the user"),
}
LAUNCHES = {"srun": (2, 1), "fork": (1, 2), "torchrun": (1, 2)}  # nodes and ranks per node: each has two ranks
FULL = 20  # tries per launch


@pytest.fixture(scope="module")
def patient() -> Iterator[MiniSlurm]:
    """A cluster with KillWait and GraceTime as on real clusters; other tests use 3 s."""
    with MiniSlurm(nodes=2, gpus=0, name=f"pytest-{os.getpid()}-saves", options={"KillWait": "30"}) as slurm:
        slurm.run("scontrol", "update", "PartitionName=main", "GraceTime=60", "PreemptMode=CANCEL")
        yield slurm


@pytest.mark.slurm
@pytest.mark.chaos(short=True)
@pytest.mark.timeout(3000 if os.environ.get(ALL) == "1" else 400)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_it_saves(hpcinit: Run, patient: MiniSlurm, launch: str) -> None:
    """Every attempt ends with a complete checkpoint of the step at which all ranks stopped.

    `make chaos` makes 20 attempts per launch. `make test-all` makes 2, which together cover all ways.
    """
    Path("train.py").write_text(PROGRAM)
    asks, offset = list(ASKS), 2 * list(LAUNCHES).index(launch)
    tries = range(FULL) if os.environ.get(ALL) == "1" else range(offset, offset + 2)
    saved: collections.Counter[str] = collections.Counter()
    failures = []
    for number in tries:
        ask, method, persistent = asks[number % 5], METHODS[number % 3], number % 2 == 0
        if problem := _try(hpcinit, patient, launch, ask, method, persistent):
            failures.append(f"{ask}, {method}, persistent={persistent}: {problem}")
        else:
            saved[ask] += 1
    print(f"{datetime.date.today()} launch={launch}: {saved.total()} of {len(tries)} saved; {dict(saved)}")
    assert not failures


def _try(hpcinit: Run, slurm: MiniSlurm, launch: str, ask: str, method: str, persistent: bool) -> str:
    """Return a problem, or '' if the run saved."""
    nodes, per_node = LAUNCHES[launch]
    shape = [f"nodes={nodes}", f"launch={launch}", f"ranks_per_node={per_node}", "cluster.gpus_per_node=0"]
    shape += ["cluster.cpus_per_node=null", "time_min=20"]
    done = submit(hpcinit, slurm, *shape, "--", "train.py", method, str(persistent))
    folder, job = folder_of(done), job_id_of(done)
    logs = [folder / f"logs/rank-{rank}.log" for rank in range(nodes * per_node)]
    until(lambda: all(log.exists() and "step 10\n" in log.read_text() for log in logs))
    how, reason = ASKS[ask]
    how(hpcinit, slurm, folder, job)
    until(lambda: exit_status(folder) is not None)  # Slurm reports a preempted job as ended while its ranks save
    found = [re.findall(r"^saved step (\d+): (.*)$", log.read_text(), re.MULTILINE) for log in logs]
    if found[0] and found == [found[0]] * len(found) and found[0][0][1] == reason:
        steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoints/step-*")]
        return "" if steps == [int(found[0][0][0])] else f"checkpoints of steps {steps}, and {found[0]}"
    return f"{found}\n" + "\n".join(log.read_text()[-1500:] for log in logs)
