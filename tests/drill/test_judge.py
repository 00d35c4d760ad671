"""Programs that someone else wrote, each with one planted bug. `python -m tests.drill.judge` runs all of them."""

from __future__ import annotations

import pytest
import yaml

from tests.drill.judge.__main__ import HERE, drill


@pytest.mark.more
@pytest.mark.ranks
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["accum", "distill", "megatron", "mmrunner_async", "moe_noisy_2", "torchvision_ref", "zipformer_ctc"]
)
def test_a_bug_is_named_and_the_correct_program_passes(name: str) -> None:
    """The first cause is the planted bug. The correct program has no finding."""
    truth = yaml.safe_load((HERE / name / "truth.yaml").read_text())
    status, causes, _ = drill(HERE / name, truth["options"], bug=True)
    assert status == 1 and causes[0] in truth["cause"], causes
    assert drill(HERE / name, truth["options"], bug=False)[:2] == (0, [])
