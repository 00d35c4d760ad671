"""A short form of `make soak`: two faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import soak


@pytest.mark.slurm
@pytest.mark.chaos(short=True)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", ["a node is lost", "a node loses its network"])
def test_two_faults_in_a_training_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """After a killed rank and a lost node, the losses of all ranks equal those of an undisturbed run at every step.

    The spare node takes the place of the lost one in the same step, which ends although a node was lost.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    faults = ["kill -9 of a rank", lost]
    assert soak.run(tmp_path, minutes=1.5, every_s=35, seed=1, kinds=faults) == []
    said = capsys.readouterr().out
    assert said.count("(warm)") == 2, said
