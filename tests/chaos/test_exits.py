"""Each way in which one of four ranks can end or hang: the first line of `why`, the rank, the kind, and what is left.

The program, exit_faults.py, uses hpcinit.init() ('init') or torch alone ('plain'). `make test-all` tries each fault
once, `make chaos` tries all combinations and writes a table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.chaos import exit_faults, exit_table
from tests.chaos.conftest import ALL
from tests.chaos.training import Training
from tests.conftest import Run
from tests.minislurm import MiniSlurm
from tests.submit.test_restart import state
from tests.submitting import folder_of, submit
from tests.waiting import until

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(1500)]

# Ranks that share one node import torch once with launch=fork.
SHAPES = {"srun": (2, 2), "fork": (1, 4), "torchrun": (1, 4)}
WHO = r"rank 3 on n\d"
CALLS = r"the ranks called different collectives( \(step \d\))?: rank 3 waits in "
CALLED = r"a collective hung( \(step \d\))?: rank 3 called "  # from the dumps of torch's flight recorder
# A hang of the program is found by its steps, or if it reports none, by its output.
HANG = rf"the training hung: {WHO} (is not in a collective: it is at exit_faults.py|does not respond: process)"
FAILED = rf"{WHO} failed first"
KILLED = rf"{WHO} was killed by a signal "
EXPECTED = {  # fault: (kind, pattern of the first line)
    "exception": ("program", rf"{FAILED}.* ValueError: bad sample 17"),
    "thread": ("hang", rf"{HANG}:\d+ in failing_thread"),
    "sigkill": ("signal", rf"{KILLED}\(Killed\) first"),
    "sigterm": ("signal", rf"{KILLED}\(Terminated\) first"),
    "sigint": ("signal", rf"{WHO} was interrupted by SIGINT first"),
    "sigsegv": ("signal", rf"{KILLED}\(Segmentation fault\) first"),
    "abort": ("signal", rf"{KILLED}\(Aborted\) first"),
    "os-exit": ("early-end", rf"{WHO} ended first, with exit status 0"),
    "sys-exit": ("early-end", rf"{WHO} ended first, with exit status 0"),
    "return": ("early-end", rf"{WHO} ended first, with exit status 0"),
    "skip": ("early-end", rf"{WHO} ended first, with exit status 0"),
    "loop": ("hang", rf"{HANG}:\d+ in endless"),
    "held-gil": ("hang", rf"{HANG} \d+"),
    "sigstop": ("hang", rf"{HANG} \d+"),
    "memory": ("host-memory", rf"{FAILED}.* MemoryError"),
    "broadcast": (
        "mismatch",
        rf"(?:{CALLS}broadcast, called at exit_faults.py:\d+ .*; ranks 0-2 wait in|{CALLED}broadcast .* where ranks 0-2 called) all_reduce",
    ),
    "size": ("mismatch", rf"{CALLS}all_reduce, called at exit_faults.py:\d+ in <lambda>; ranks 0-2 wait in all_reduce"),
    "loader": ("host-memory", rf"{FAILED}.* DataLoader worker \(pid \d+\) is killed by signal: Killed"),
    "disk": ("disk", rf"{FAILED}.* No space left on device"),
}
# `make test-all`: most with launch=fork, which is the cheapest, and with srun or torchrun where they report the end.
ONCE = {
    "exception": ("plain", "fork"),
    "sigterm": ("plain", "srun"),
    "sigint": ("init", "torchrun"),
    "os-exit": ("init", "srun"),
    "return": ("plain", "torchrun"),
    "loop": ("plain", "fork"),
    "sigstop": ("plain", "fork"),
    "size": ("plain", "fork"),
    "loader": ("plain", "fork"),
}


@dataclass(frozen=True)
class Case:
    """A submitted job. kind: 'init' or 'plain'."""

    fault: str
    kind: str
    launch: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.fault}, {self.kind}, launch={self.launch}"


def test_every_fault_has_an_expected_verdict() -> None:
    assert EXPECTED.keys() == exit_faults.FAULTS.keys()


@pytest.mark.chaos(short=True)
def test_each_fault_once(hpcinit: Run, idle_slurm: MiniSlurm) -> None:
    """Each fault under one launch. The 19 jobs run side by side; each has its own run folder, which `why` reads."""
    _try(hpcinit, idle_slurm, [(fault, *ONCE.get(fault, ("init", "fork"))) for fault in EXPECTED])


@pytest.mark.parametrize("launch", SHAPES)
@pytest.mark.parametrize("kind", ["init", "plain"])
def test_each_fault(hpcinit: Run, idle_slurm: MiniSlurm, kind: str, launch: str) -> None:
    """All faults under this launch, with hpcinit.init() or with torch alone."""
    _try(hpcinit, idle_slurm, [(fault, kind, launch) for fault in EXPECTED])


def _try(hpcinit: Run, slurm: MiniSlurm, wanted: Sequence[tuple[str, str, str]]) -> None:
    shutil.copy(exit_faults.__file__, "exit_faults.py")
    cases = [Case(*one, _submitted(hpcinit, slurm, *one)) for one in wanted]
    wrong = []
    for case in cases:
        run = Training(hpcinit, slurm, case.folder, case.folder, case.launch)
        until(lambda run=run: state(slurm, run.job) in {"FAILED", "COMPLETED", "CANCELLED", "TIMEOUT"}, 600)
        found = json.loads(hpcinit("why", str(case.folder), "--json", env=slurm.env).stdout)
        kind, first = EXPECTED[case.fault]
        right = bool(re.match(first, found["verdict"])) and (found["rank"], found["kind"]) == (3, kind)
        if not right:
            wrong.append(f"{case}: rank {found['rank']}, {found['kind']}: {found['verdict']}")
        until(lambda run=run: not run.processes(), 60)
        if os.environ.get(ALL) == "1":
            outcome = {
                "line": found["verdict"],
                "kind": found["kind"],
                "right": right,
                "seconds": _seconds(slurm, run),
            }
            exit_table.keep(case.fault, case.kind, case.launch, outcome)
    assert not wrong, "\n".join(wrong)


def _submitted(hpcinit: Run, slurm: MiniSlurm, fault: str, kind: str, launch: str) -> Path:
    nodes, ranks = SHAPES[launch]
    shape = [f"nodes={nodes}", f"ranks_per_node={ranks}", f"launch={launch}", f"job.name={fault}-{kind}-{launch}"]
    short = ["hang.after_s=5", f"comm.collective_timeout_s={exit_faults.TIMEOUT_S}", "time_min=20"]
    plain = ["plain"] if kind == "plain" else []
    request = [*shape, *short, "cluster.gpus_per_node=0", "cluster.cpus_per_node=null"]
    return folder_of(submit(hpcinit, slurm, *request, "--", "exit_faults.py", fault, *plain))


def _seconds(slurm: MiniSlurm, run: Training) -> float | None:
    """Return the seconds from the fault to the end of the job, which Slurm reports in whole seconds."""
    shown = dict(word.partition("=")[::2] for word in slurm.run("scontrol", "-o", "show", "job", run.job).split())
    ended = datetime.fromisoformat(shown["EndTime"]).timestamp()
    fault = run.folder / "fault_time"
    return round(max(0.0, ended - float(fault.read_text())), 1) if fault.exists() else None
