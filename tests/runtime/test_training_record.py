"""The record for `hpcinit report` also has the steps before a hang."""

from __future__ import annotations

import time
from pathlib import Path

from hpcinit.records import training_spans
from hpcinit.runtime.lifecycle.training_record import TrainingRecord


def test_the_last_steps_before_a_hang_are_recorded(tmp_path: Path) -> None:
    """Steps that follow a write within its pause are written without a further call."""
    record = TrainingRecord(tmp_path)
    for step in range(1, 6):
        record.step(step)
    deadline = time.monotonic() + 30
    while not (spans := training_spans.read(tmp_path)) or spans[-1].last != 5:
        assert time.monotonic() < deadline, spans
        time.sleep(0.05)
    assert [span.what for span in spans] == [training_spans.FIRST, training_spans.STEPS]
