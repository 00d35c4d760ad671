"""run.should_stop(): all ranks stop at the same step, whichever rank detects a reason, and report it."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from hpcinit.base.errors import RequestError
from hpcinit.records import run_folder
from hpcinit.records.spec import Program, Spec
from hpcinit.records.stop_reasons import Reason, Stop, Stopping
from tests.runtime.spawned import Rank, ranks

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
import hpcinit
run = hpcinit.init(backend="gloo")
for step in range(2000):
    time.sleep(0.01 * (1 + run.rank))  # the ranks are not in step but for their collectives
    dist.all_reduce(torch.ones(1))
    print("step", step, flush=True)
    if stop := run.should_stop():
        print(f"stopped after {step}: {stop}", flush=True)
        break
"""
# Exit like hpcinit.run: in Python's last shutdown step gloo's threads may abort (runtime/interpreter_exit.py).
END = "from hpcinit.runtime import interpreter_exit\nhpcinit.shutdown()\ninterpreter_exit.end(0)\n"


def until(path: Path, text: str, timeout_s: float = 150) -> None:
    end = time.monotonic() + timeout_s
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {path.read_text() if path.exists() else path}"
        time.sleep(0.05)


def last_lines(found: list[Rank]) -> list[str]:
    ends = [rank.end() for rank in found]
    assert [status for status, _ in ends] == [0] * len(found), ends
    return [text.strip().splitlines()[-1] for _, text in ends]


@pytest.mark.parametrize("number", [0, 2])
def test_sigterm_to_one_rank_stops_all_at_one_step(tmp_path: Path, number: int) -> None:
    """SIGTERM (preemption, scancel) to one rank stops all ranks at the same step with the same reason."""
    with ranks(TRAIN + END, 3, tmp_path) as found:
        until(tmp_path / f"rank-{number}.log", "step 20")
        found[number].process.send_signal(signal.SIGTERM)
        lines = last_lines(found)
    assert len(set(lines)) == 1 and lines[0].startswith("stopped after "), lines
    assert lines[0].endswith(f": terminated by SIGTERM (rank {number})")


def test_stop_before_the_time_limit(tmp_path: Path) -> None:
    """The margin is a fifth of the remaining time, because 60 s would be all of it."""
    soon = "os.environ['HPCINIT_JOB_END_TIME'] = str(int(time.time()) + 8)\n"
    code = TRAIN.replace("for step in", f"{soon}for step in") + "print(run.time_left() > run.time_left() * 0)\n"
    with ranks(code + END, 2, tmp_path) as found:
        ends = [rank.end()[1].strip().splitlines()[-2:] for rank in found]
    assert ends[0] == ends[1] and ends[0][0].endswith(": time limit (rank 0)"), ends
    assert ends[0][1] == "True"  # some time remained


def test_a_users_request_in_the_run_folder(tmp_path: Path) -> None:
    """Rank 0 removes the file of the request, so that the next attempt does not stop."""
    code = TRAIN.replace("run = hpcinit.init", "from pathlib import Path\nrun = hpcinit.init").replace(
        "for step in", f"object.__setattr__(run, 'folder', Path({str(tmp_path)!r}))\nfor step in"
    )
    with ranks(code + END, 2, tmp_path) as found:
        until(tmp_path / "rank-0.log", "step 5")
        (tmp_path / "stop").touch()
        lines = last_lines(found)
    assert lines[0] == lines[1] and lines[0].endswith(": requested by the user (rank 0)"), lines
    assert not (tmp_path / "stop").exists()


def test_a_signal_in_a_collective_is_noted_and_a_stuck_rank_ends(tmp_path: Path) -> None:
    """While the main thread waits for a stopped peer, a thread ends the process as SIGTERM would."""
    code = TRAIN.replace(
        "for step in", "from hpcinit.runtime.lifecycle import sigterm\nsigterm.STUCK_S = 1\nfor step in"
    )
    with ranks(code + END, 2, tmp_path) as found:
        until(tmp_path / "rank-0.log", "step 20")
        found[1].process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        found[0].process.send_signal(signal.SIGTERM)
        assert found[0].process.wait(150) == -signal.SIGTERM
        assert "stopped after" not in (tmp_path / "rank-0.log").read_text()


def test_the_programs_handler_is_kept(tmp_path: Path) -> None:
    """The program's handler runs and the ranks still agree; asyncio's wake-up descriptor works too."""
    code = TRAIN.replace(
        "for step in",
        "import signal, socket\n"
        "a, b = socket.socketpair(); b.setblocking(False); signal.set_wakeup_fd(b.fileno())\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('mine', a.recv(1)[0], flush=True))\nfor step in",
    )
    with ranks(code + END, 2, tmp_path) as found:
        until(tmp_path / "rank-1.log", "step 20")
        found[1].process.send_signal(signal.SIGTERM)
        last_lines(found)
    assert f"mine {int(signal.SIGTERM)}" in (tmp_path / "rank-1.log").read_text()


def test_after_shutdown_sigterm_ends_a_process_again(tmp_path: Path) -> None:
    """shutdown restores the handlers, so that SIGTERM ends a program that continues after training."""
    code = TRAIN.replace("range(2000)", "range(3)") + "hpcinit.shutdown()\nprint('over', flush=True)\ntime.sleep(600)\n"
    with ranks(code + END, 1, tmp_path) as (rank,):
        until(tmp_path / "rank-0.log", "\nover\n")  # not 'over' alone: "override" is printed earlier
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(150) == -signal.SIGTERM


def test_an_early_signal_is_kept(tmp_path: Path) -> None:
    """A signal that arrives before the first should_stop() is kept, and does not end the rank."""
    code = TRAIN.replace(
        "for step in",
        "import signal\nfrom hpcinit.records.stop_reasons import Stopping\nfrom hpcinit.runtime.lifecycle import signal_watch\n"
        "object.__setattr__(run.plan, 'stopping', Stopping(signal='USR1'))\n"
        "signal_watch.hold(signal.SIGUSR1); os.kill(os.getpid(), signal.SIGUSR1)\nfor step in",
    )
    with ranks(code + END, 1, tmp_path) as found:
        assert last_lines(found) == ["stopped after 0: time limit (rank 0)"]


FIRST_STEP = TRAIN.replace(
    "    dist.all_reduce", "    print('busy', flush=True); step or time.sleep(5)\n    dist.all_reduce"
)


def run_of(folder: Path, size: int, stop: Stopping) -> dict[str, str]:
    """Write the spec of a run of `size` ranks, and return the variable with its folder."""
    spec = Spec("r", "c", 1, size, Program("script", "train.py"), str(folder), nonce="n", stop=stop)
    (folder / run_folder.SPEC).write_text(spec.to_json())
    return {run_folder.ENV_FOLDER: str(folder)}


CONTINUES = Stopping(continues=True)


@pytest.mark.parametrize("stop", [CONTINUES, Stopping(signal="USR1")])
def test_sigterm_in_the_first_step_is_honored_after_it(tmp_path: Path, stop: Stopping) -> None:
    """In a chain, with restarts, and with stop.signal, SIGTERM in the first step leads to the save."""
    with ranks(FIRST_STEP + END, 2, tmp_path, **run_of(tmp_path, 2, stop)) as found:
        until(tmp_path / "rank-1.log", "busy")
        found[1].process.send_signal(signal.SIGTERM)
        lines = last_lines(found)
    assert set(lines) == {"stopped after 0: terminated by SIGTERM (rank 1)"}


def test_sigterm_in_the_first_step_of_a_run_that_nothing_continues(tmp_path: Path) -> None:
    """Without a chain, restarts and stop.signal, SIGTERM before the first should_stop() ends a rank at once."""
    with ranks(FIRST_STEP + END, 1, tmp_path, **run_of(tmp_path, 1, Stopping())) as (rank,):
        until(tmp_path / "rank-0.log", "busy")
        assert not int(_field(rank.process.pid, "SigCgt"), 16) >> (signal.SIGTERM - 1) & 1
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(150) == -signal.SIGTERM
    assert "step 0" not in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize(
    "before",
    ["run.progress(1, 2)", "from hpcinit.runtime.lifecycle import sigterm; sigterm.FIRST_STEP_S = 0"],
)
def test_sigterm_to_a_program_of_a_chain_that_never_stops_early(tmp_path: Path, before: str) -> None:
    """A program that reports steps without should_stop(), or does not call it for 10 minutes (here 0 s), ends at once."""
    code = FIRST_STEP.replace("if stop := run.should_stop():", "if stop := None:").replace("time.sleep(5)", "forever()")
    forever = "def forever():\n    while True: time.sleep(0.01)\n"
    code = code.replace("for step in", f"{forever}{before}\nfor step in")
    with ranks(code + END, 1, tmp_path, **run_of(tmp_path, 1, CONTINUES)) as (rank,):
        until(tmp_path / "rank-0.log", "busy")
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(150) == -signal.SIGTERM


def test_a_rank_that_is_stuck_in_the_first_step_ends(tmp_path: Path) -> None:
    code = FIRST_STEP.replace(
        "for step in", "from hpcinit.runtime.lifecycle import sigterm\nsigterm.STUCK_S = 1\nfor step in"
    )
    with ranks(code + END, 2, tmp_path, **run_of(tmp_path, 2, CONTINUES)) as found:
        until(tmp_path / "rank-0.log", "busy")
        found[1].process.send_signal(signal.SIGSTOP)
        found[0].process.send_signal(signal.SIGTERM)
        assert found[0].process.wait(150) == -signal.SIGTERM
    assert "step 0" not in (tmp_path / "rank-0.log").read_text()


def test_sigterm_after_shutdown_without_a_step(tmp_path: Path) -> None:
    """shutdown restores SIGTERM also if should_stop() was never called."""
    code = TRAIN.replace("range(2000)", "range(0)") + "hpcinit.shutdown()\nprint('over', flush=True)\ntime.sleep(600)\n"
    with ranks(code + END, 1, tmp_path) as (rank,):
        until(tmp_path / "rank-0.log", "\nover\n")  # not 'over' alone: "override" is printed earlier
        rank.process.send_signal(signal.SIGTERM)
        assert rank.process.wait(150) == -signal.SIGTERM


def _field(pid: int, name: str) -> str:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:"))


@pytest.mark.parametrize(
    ("cost_s", "step_s", "steps"),
    [(0.0001, 0.05, 1), (0.0006, 0.05, 3), (0.00501, 0.05, 21), (1.0, 0.05, 200), (0.001, 60.0, 1), (0.1, 0.0, 1)],
)
def test_how_often_ranks_agree(cost_s: float, step_s: float, steps: int) -> None:
    """Agreements cost at most half a percent of the time, and are at most 10 s apart."""
    from hpcinit.runtime.lifecycle.stopping import every

    assert every(cost_s, step_s) == steps


def test_time_before_the_first_step_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before the first step is not measured: as a short step it would make agreements too rare."""
    from hpcinit.runtime.lifecycle.stopping import TIMED, Stopper
    from hpcinit.world import World

    alone = World("env", 0, 1, 0, 1, 0, ("here",), "here", (29500,))
    stopper = Stopper(alone, Stopping(), timedelta(seconds=5), None, {})
    try:
        for _ in range(TIMED):
            stopper.ask()  # as run.should_stop() does right after creating it
            time.sleep(0.05)
    finally:
        stopper.close()
    assert min(stopper._steps) >= 0.05 and stopper._every == 1


def test_the_margin() -> None:
    """The margin includes twice the longest save; for a short job it is a fifth, and at least one save."""
    margin = Stopping(margin_s=60).margin
    assert margin(timedelta(hours=1), timedelta(seconds=20)) == timedelta(seconds=100)
    assert margin(timedelta(seconds=100), timedelta()) == timedelta(seconds=20)
    assert margin(timedelta(seconds=100), timedelta(seconds=30)) == timedelta(seconds=30)


def test_texts_of_reasons() -> None:
    """The texts that users read, and invalid values."""
    assert str(Stop(Reason.PREEMPTED, 3)) == "preempted (rank 3)"
    for wrong in ({"margin_s": -1.0}, {"every_steps": 0}):
        with pytest.raises(RequestError, match="expected 0 or more seconds, and 1 or more steps"):
            Stopping(**wrong)  # type: ignore[arg-type]


def test_a_long_save_finishes_after_a_signal(tmp_path: Path) -> None:
    """A save that takes longer than the time after which a silent rank counts as stuck (10 s, here 1 s) is not stuck."""
    code = TRAIN.replace(
        "for step in",
        "import hpcinit.train.checkpoint\nfrom hpcinit.runtime.lifecycle import sigterm\nsigterm.STUCK_S = 1\n"
        "hpcinit.train.checkpoint.save = lambda *a, **k: time.sleep(12)\nfor step in",
    ).replace("    if stop", "    if step == 20: run.save(None, 'x', step); print('saved', flush=True)\n    if stop")
    with ranks(code + END, 2, tmp_path) as found:
        until(tmp_path / "rank-0.log", "step 20")
        time.sleep(0.5)
        for rank in found:
            rank.process.send_signal(signal.SIGTERM)
        lines = last_lines(found)
    assert lines[0] == lines[1] and lines[0].endswith(": terminated by SIGTERM (rank 0)"), lines
    assert "saved" in (tmp_path / "rank-0.log").read_text()
