"""The place of the main thread: one for a loop over several lines, another for each function and each collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hpcinit.runtime.lifecycle import output_watch
from tests.runtime.spawned import ranks

SAMPLES = 2000
begun, ended = threading.Event(), threading.Event()


def sampled(work: Callable[[], None], enough: Callable[[set[object], int], bool]) -> set[object]:
    """Return the places at which another thread sees work(), which sets `begun` and runs until `ended`."""
    places: set[object] = set()
    begun.clear()
    ended.clear()

    def sample() -> None:
        begun.wait()
        samples = 0
        while not enough(places, samples):
            places.add(output_watch._main_place())
            samples += 1
        ended.set()

    threading.Thread(target=sample).start()
    work()
    return places


def test_a_loop_over_several_lines() -> None:
    """It has one place, also while it is in functions of the standard library."""

    def read() -> None:
        begun.set()
        tries = 0
        while not ended.is_set():
            tries += 1
            path = Path("missing")
            if path.exists():
                break

    [place] = sampled(read, lambda _, samples: samples == SAMPLES)
    assert any("read" in frame for frame in place)  # type: ignore[attr-defined]


def test_a_slow_evaluation() -> None:
    """It calls functions of the program, and has another place in each and at each line that calls one."""

    def layer(until: int) -> int:
        return sum(range(until))

    def evaluate() -> None:
        begun.set()
        while not ended.is_set():
            layer(1000)
            layer(2000)

    places = sampled(evaluate, lambda found, _: len([one for one in found if "layer" in str(one)]) > 1)
    assert len(places) > 1


ONE_LINE = """
import torch, torch.distributed as dist
from hpcinit.runtime.lifecycle import output_watch
print(len({output_watch._main_place() for _ in range(3)}))
dist.init_process_group("gloo")
places = {(dist.all_reduce(torch.ones(1)), output_watch._main_place()) for _ in range(3)}
print(len(places), len({output_watch._main_place() for _ in range(3)}))
"""


def test_each_collective_has_a_place(tmp_path: Path) -> None:
    """A rank that calls collectives at one line is not stuck there."""
    with ranks(ONE_LINE, 1, tmp_path) as [rank]:
        status, output = rank.end()
    # torch 2.10 prints lines of gloo, too
    assert (status, [line for line in output.splitlines() if not line.startswith("[Gloo]")]) == (0, ["1", "3 1"])
