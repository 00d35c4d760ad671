"""pytest plugin: the fixture `slurm`, and a visible line at the end if Slurm tests were skipped."""

import os
from collections.abc import Iterator

import pytest

from tests.minislurm.cluster import MiniSlurm, sweep
from tests.minislurm.packages import missing
from tests.skip_or_fail import skip_or_fail

LEFT_OUT = "needs a real Slurm, and this machine lacks: "
HINT = "python -m tests.minislurm install"


@pytest.fixture(scope="session")
def slurm() -> Iterator[MiniSlurm]:
    """A cluster of 4 nodes with 8 stand-in GPUs each, for all tests of the session."""
    require_slurm()
    sweep()  # removes clusters of sessions that were killed
    with MiniSlurm(nodes=4, gpus=8, name=f"pytest-{os.getpid()}") as cluster:
        yield cluster


@pytest.fixture
def idle_slurm(slurm: MiniSlurm) -> Iterator[MiniSlurm]:
    """Yield the same cluster, and cancel the test's remaining jobs afterwards."""
    yield slurm
    slurm.cancel_all()


@pytest.fixture
def mini(idle_slurm: MiniSlurm, monkeypatch: pytest.MonkeyPatch) -> MiniSlurm:
    """The same cluster for hpcinit in this process: its environment has the cluster's variables."""
    for name, value in idle_slurm.env.items():
        monkeypatch.setenv(name, value)
    return idle_slurm


def require_slurm(accounting: bool = False) -> None:
    """Skip if no cluster can be made, or fail if CI=true, because skips would not be noticed there."""
    lacks = missing(accounting)
    if lacks:
        skip_or_fail(LEFT_OUT + "; ".join(lacks))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slurm"):
        require_slurm()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])
               if isinstance(report.longrepr, tuple) and LEFT_OUT in report.longrepr[2]]  # fmt: skip
    if reasons:
        lacks = reasons[0].partition(LEFT_OUT)[2]
        terminalreporter.section("Slurm", sep="!", red=True)
        terminalreporter.line(f"{len(reasons)} Slurm tests SKIPPED: this machine lacks {lacks}", red=True)
        terminalreporter.line(f"To run them too, as root: {HINT}")
    elif deselected := _deselected(terminalreporter):
        expression = terminalreporter.config.option.markexpr
        terminalreporter.line(f"{deselected} Slurm tests were skipped by -m '{expression}'")


def _deselected(terminalreporter: pytest.TerminalReporter) -> int:
    """Return the number of deselected tests with -m. With names or -k the user knows what is skipped."""
    if not terminalreporter.config.option.markexpr:
        return 0
    items = terminalreporter.stats.get("deselected", [])
    return sum(1 for item in items if item.get_closest_marker("slurm"))
