"""A progress bar that another stream has cut in two."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.report import log_events

START = "  0%|          | 0/130 [00:00<?, ?it/s]\n"
BEFORE = " 32%|███▏      | 42/130 [00:12<00:26,  3.28it/s]\n"


@pytest.mark.parametrize(
    ("torn", "steps"),
    [
        (" 33%|███▎      | 4{'loss': '0.1423', 'epoch': '2.812'}\n3/130 [00:13<00:26,  3.29it/s]\n", [0, 42, 44]),
        ("  2%|▏         | 3/130 [00:00<00:38,  3.33it/s]\n", [0, 42, 3, 44]),
    ],
)
def test_a_cut_number_is_no_step(torn: str, steps: list[int], tmp_path: Path) -> None:
    """A step number that goes back counts only if the elapsed time of the bar goes back too, as after a restart."""
    log = tmp_path / "slurm-1.out"
    log.write_text(START + BEFORE + torn + " 34%|███▍      | 44/130 [00:13<00:26,  3.30it/s]\n")
    stream = log_events.read(log, 0.0)
    assert stream and [one.step for one in stream.events if one.kind == "step"] == steps
