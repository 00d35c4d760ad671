"""pytest plugin: the fixture `slurm`, and a visible line at the end when Slurm tests were left out."""

import os
from collections.abc import Iterator

import pytest

from tests.leaving_out import leave_out
from tests.minislurm.cluster import MiniSlurm, sweep
from tests.minislurm.packages import missing

LEFT_OUT = "needs a real Slurm, and this machine lacks: "
HINT = "python -m tests.minislurm install"


@pytest.fixture(scope="session")
def slurm() -> Iterator[MiniSlurm]:
    """A cluster of 4 nodes with 8 stand-in GPUs each, for all tests of the session."""
    require_slurm()
    sweep()  # what a session left that was killed
    with MiniSlurm(nodes=4, gpus=8, name=f"pytest-{os.getpid()}") as cluster:
        yield cluster


@pytest.fixture
def idle_slurm(slurm: MiniSlurm) -> Iterator[MiniSlurm]:
    """The same cluster; jobs that a test leaves behind are cancelled after it."""
    yield slurm
    slurm.cancel_all()


def require_slurm(accounting: bool = False) -> None:
    """Skips where no cluster can be made; fails there with CI=true, where a skip would go unseen."""
    lacks = missing(accounting)
    if lacks:
        leave_out(LEFT_OUT + "; ".join(lacks))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm"):
        require_slurm()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])
               if isinstance(report.longrepr, tuple) and LEFT_OUT in report.longrepr[2]]  # fmt: skip
    if reasons:
        lacks = reasons[0].partition(LEFT_OUT)[2]
        terminalreporter.section("Slurm", sep="!", red=True)
        terminalreporter.line(f"{len(reasons)} Slurm tests LEFT OUT: this machine lacks {lacks}", red=True)
        terminalreporter.line(f"To run them too, as root: {HINT}")
    elif deselected := _deselected(terminalreporter):
        expression = terminalreporter.config.option.markexpr
        terminalreporter.line(f"{deselected} Slurm tests were left out by -m '{expression}'")


def _deselected(terminalreporter: pytest.TerminalReporter) -> int:
    """Only with -m: who selects by name or by -k knows what is left out."""
    if not terminalreporter.config.option.markexpr:
        return 0
    items = terminalreporter.stats.get("deselected", [])
    return sum(1 for item in items if item.get_closest_marker("slurm"))
