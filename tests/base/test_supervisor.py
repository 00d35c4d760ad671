"""Supervisor, which fork, torchrun and the local engine share, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hpcinit
from hpcinit.base import signals
from hpcinit.base.supervisor import Child, Supervisor
from tests.waiting import until

IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
)


class Recorded(Supervisor):
    """A supervisor that records the exits of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.exits: list[tuple[int, int | None]] = []

    def on_exit(self, child: Child) -> bool:
        self.exits.append((child.number, child.ended()))
        return False


def pause(timeout_s: float) -> None:
    time.sleep(min(timeout_s, 0.01))


def test_every_exit_is_reported_once_with_its_status() -> None:
    """The exit statuses are those of the children; a signal's number is negative."""
    them = Recorded()
    for number, code in enumerate(("exit 0", "exit 7", "kill -9 $$")):
        them.start(number, ["bash", "-c", code], os.environ)
    them.supervise(pause)
    assert sorted(them.exits) == [(0, 0), (1, 7), (2, -9)]
    assert them.ended() == {0: 0, 1: 7, 2: -9}
    them.stop(0.0)


def test_an_exit_during_another_report_is_not_lost() -> None:
    """A child that exits while on_exit() of the last other child runs is reported too."""

    class Late(Recorded):
        def on_exit(self, child: Child) -> bool:
            if child.number == 1:
                self.children[0].signal(signal.SIGKILL)
                until(lambda: self.children[0].ended() is not None, pause_s=0.01)
            return super().on_exit(child)

    them = Late()
    them.start(0, ["sleep", "300"], os.environ)
    them.start(1, ["true"], os.environ)
    them.supervise(pause)
    them.stop(0.0)
    assert them.exits == [(1, 0), (0, -9)]


def test_stop_kills_whole_groups(tmp_path: Path) -> None:
    """After the grace time SIGKILL is sent to the whole group, also of a child that has already exited."""
    them = Supervisor()
    with (tmp_path / "out").open("w+b") as out:
        them.start(0, [sys.executable, "-c", IGNORES_SIGTERM], os.environ, output=out)
        them.start(1, ["bash", "-c", "sleep 300 & echo $!"], os.environ, output=out)
        until(lambda: len((tmp_path / "out").read_text().split()) == 2, pause_s=0.02)
    (left,) = (int(each) for each in (tmp_path / "out").read_text().split() if each.isdigit())
    until(lambda: them.ended() == {1: 0}, pause_s=0.02)
    os.kill(left, 0)  # it survives its parent until stop()
    them.stop(0.2)
    assert them.ended() == {0: -signal.SIGKILL, 1: 0}
    until(lambda: not Path(f"/proc/{left}").exists() or "Z" in Path(f"/proc/{left}/stat").read_text(), pause_s=0.02)


def test_kill_in_kills_what_still_runs() -> None:
    """A forked child that blocks SIGTERM is killed, and supervise() reports its exit."""

    class Impatient(Recorded):
        def on_signal(self, number: int) -> bool:
            self.kill_in(0.05)
            return super().on_signal(number)

    them, given = Impatient(), [signal.SIGTERM]
    with signals.blocked([signal.SIGTERM]):  # the child inherits it
        if them.fork_child(5):
            try:
                os.setsid()
                time.sleep(300)
            finally:
                os._exit(0)
    them.supervise(lambda timeout_s: given.pop() if given else pause(timeout_s))  # type: ignore[func-returns-value]
    assert them.exits == [(5, -signal.SIGKILL)]
    them.children[5].reap()


def test_a_reaped_child_is_not_signalled() -> None:
    """A signal to a reaped child is not sent, because its process id may belong to another process."""
    them = Supervisor()
    child = them.start(0, ["true"], os.environ)
    child.reap()
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    child.pid = other.pid  # as if the kernel had given the number away
    child.signal(signal.SIGKILL)
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize(
    "path", ["launch/fork_server.py", "launch/torchrun/agent.py", "engine/local_step.py", "engine/local_job.py"]
)
def test_only_the_supervisor_kills_groups(path: str) -> None:
    """fork, torchrun and the local engine use killpg, waitid and waitpid only through the supervisor."""
    source = (Path(hpcinit.__file__).parent / path).read_text()
    source = source.replace("os.waitpid(-1, os.WNOHANG)", "")  # reaps the orphans that a local job inherits at its end
    assert not [call for call in ("killpg", "waitid", "waitpid") if call in source]
