"""`hpcinit why` for very many ranks: the work grows with their number, and not faster."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from benchmarks.dumps import failing_ranks
from hpcinit.why import diagnosis, foreign_job
from hpcinit.why.log_lines import Log


def calls(ranks: int) -> int:
    """Return how many functions of hpcinit one diagnosis calls if `ranks` ranks fail."""
    logs = [Log(failing_ranks(ranks))]
    count = 0

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and "hpcinit" in frame.f_code.co_filename

    sys.setprofile(called)
    try:
        diagnosis.diagnose(foreign_job.gather(logs).evidence)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.timeout(120)
def test_the_work_grows_with_the_number_of_ranks() -> None:
    """Each rank was compared with every other one: 4,000 failing ranks took 222 s."""
    few, many = calls(100), calls(400)
    assert many < 5 * few, (few, many)
