"""A short form of `make soak`: two faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import soak


@pytest.mark.slurm
@pytest.mark.chaos(short=True)
@pytest.mark.timeout(900)
def test_two_faults_in_a_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """After a killed rank and a lost node, the losses of all ranks equal those of an undisturbed run at every step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    faults = ["kill -9 of a rank", "a node is lost"]
    assert soak.run(tmp_path, minutes=1.5, every_s=25, seed=1, kinds=faults) == []
    said = capsys.readouterr().out
    assert said.count("(warm)") == 2, said
