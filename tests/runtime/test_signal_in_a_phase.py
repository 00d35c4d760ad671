"""SIGTERM while a rank does something else than a training step: the next should_stop() honors it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.runtime.spawned import PATIENCE_S, ranks
from tests.runtime.test_stopping import END, last_lines, until
from tests.skip_or_fail import needs_torchs_compiler

# `busy` runs before the third should_stop(); 15 s are more than the 10 s after which a stuck rank ends.
TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import hpcinit
run = hpcinit.init(backend="gloo")

def work(seconds):
    print("busy", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)

def first_step(step):
    if step == 1: work(15)

def evaluation(step):
    if step == 3: work(15)

def declared_evaluation(step):
    if step == 3:
        with run.phase("evaluating"):
            print("busy", flush=True)
            time.sleep(15)

def save(step):
    if step == 3:
        wrapped = run.wrap(torch.nn.Linear(4, 4), optimizer=lambda all: torch.optim.SGD(all, lr=0.1))
        real = os.fsync
        os.fsync = lambda file: (print("busy", flush=True), time.sleep(1), real(file))
        run.save(wrapped, "FOLDER", step)
        os.fsync = real
        print("saved", flush=True)

def compilation(step):
    if step == 3:
        from torch._inductor import compile_fx
        def backend(*graph):
            print("busy", flush=True)
            return compile_fx.compile_fx(*graph)
        torch.compile(lambda x: (torch.sin(x) * torch.cos(x)).sum(), backend=backend)(torch.ones(64))

run.should_stop()
for step in range(1, 2000):
    BUSY(step)
    dist.all_reduce(torch.ones(1))
    print("step", step, flush=True)
    if stop := run.should_stop():
        print(f"stopped after {step}: {stop}", flush=True)
        break
"""


@pytest.mark.parametrize(
    ("busy", "step"),
    [
        ("first_step", 1),
        ("evaluation", 3),
        ("declared_evaluation", 3),
        pytest.param("compilation", 3, marks=(needs_torchs_compiler, pytest.mark.more)),
        ("save", 3),
    ],
)
def test_it_is_honored_at_the_next_step(tmp_path: Path, busy: str, step: int) -> None:
    code = TRAIN.replace("BUSY(", f"{busy}(").replace("FOLDER", str(tmp_path / "checkpoints"))
    with ranks(code + END, 2, tmp_path) as found:
        until(tmp_path / "rank-0.log", "busy", PATIENCE_S)
        found[0].process.send_signal(signal.SIGTERM)
        lines = last_lines(found)
    assert set(lines) == {f"stopped after {step}: terminated by SIGTERM (rank 0)"}
    if busy == "save":
        assert list((tmp_path / "checkpoints").glob("step-*3"))
