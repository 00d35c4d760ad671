"""Measure the cost of each test: `pytest --cost FILE` writes its wall time and processor time in seconds.

If a cgroup can be created (root, cgroup version 1), the processor time includes everything that pytest starts, also
Slurm's daemons and the ranks of jobs. Otherwise it includes pytest and the processes that it waited for. Each worker of
xdist appends to the same file: seconds of setup, call and teardown, each as wall/processor, then the test.
`python -m tests.cost FILE` sums them by file and by folder.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")


class Cost:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.spent: dict[str, tuple[float, float]] = {}
        self.group = ACCOUNTS / f"pytest-{os.getpid()}"
        try:
            self.group.mkdir()
            (self.group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self.group = Path()

    def processor_s(self) -> float:
        if self.group.name:
            return int((self.group / "cpuacct.usage").read_text()) / 1e9
        return sum(os.times()[:4])

    def _measure(self, phase: str) -> Generator[None, object, object]:
        wall, processor = time.monotonic(), self.processor_s()
        try:
            return (yield)
        finally:
            self.spent[phase] = (time.monotonic() - wall, self.processor_s() - processor)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        return (yield from self._measure("setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._measure("call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        return (yield from self._measure("teardown"))

    @pytest.hookimpl
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        phases = [self.spent.get(phase, (0.0, 0.0)) for phase in ("setup", "call", "teardown")]
        self.spent = {}
        with self.file.open("a") as file:
            file.write("\t".join([*(f"{wall:.2f}/{processor:.2f}" for wall, processor in phases), nodeid]) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self.group.name:
            for pid in (self.group / "cgroup.procs").read_text().split():
                (ACCOUNTS / "cgroup.procs").write_text(pid)
            self.group.rmdir()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", metavar="FILE", help="append what each test takes in wall and processor time")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--cost")
    tests_run_here = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if file and tests_run_here:
        config.pluginmanager.register(Cost(Path(file).absolute()))


def sums(lines: list[str]) -> dict[str, tuple[int, float, float]]:
    """Return by file and by folder the number of tests and their seconds of wall time and processor time."""
    spent: dict[str, tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    for line in lines:
        *phases, nodeid = line.split("\t")
        wall = sum(float(phase.partition("/")[0]) for phase in phases)
        processor = sum(float(phase.partition("/")[2]) for phase in phases)
        file = nodeid.partition("::")[0]
        for name in (file, f"{Path(file).parent}/", "all"):
            count, walls, processors = spent[name]
            spent[name] = (count + 1, walls + wall, processors + processor)
    return spent


if __name__ == "__main__":
    for name, (count, wall, processor) in sorted(
        sums(Path(sys.argv[1]).read_text().splitlines()).items(), key=lambda entry: -entry[1][1]
    ):
        print(f"{wall:8.1f} s  {processor:8.1f} s of processor time  {count:5} tests  {name}")
