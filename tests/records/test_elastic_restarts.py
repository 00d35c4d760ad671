"""Restarts inside a job: their record, their names, and the files of an earlier start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.base.errors import WorldError
from hpcinit.records import elastic_restarts, error_records, hang_report
from hpcinit.records.elastic_restarts import Restart
from hpcinit.world import launchers

WHY = Restart("43.0.0", 1, 100.0, 3, "n2", "Exited with exit code 1", "ValueError: boom", 41)
# A rank of the second start: the variables of torchrun, and those of the step, which belong to its agent.
OURS = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"},
    **{"MASTER_ADDR": "n1", "MASTER_PORT": "20000", "TORCHELASTIC_RESTART_COUNT": "1"},
    **{"TORCHELASTIC_RUN_ID": "43.0.0", "HPCINIT_AGENT": "43.0.0", "SLURM_JOB_ID": "43", "SLURM_STEP_ID": "0"},
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1", "SLURM_NTASKS": "2"},
    **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]"},
    **{"SLURMD_NODENAME": "n2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
}


def test_names_of_starts() -> None:
    """Each start has a unique name with Slurm's job and restart, and so do the agents."""
    assert [elastic_restarts.round_folder("43.0.1", number) for number in (0, 1, 12)] == [
        "43.0.1",
        "43.0e1.1",
        "43.0e12.1",
    ]
    assert elastic_restarts.agents_folder("43+1.0.0") == "43+1.0a.0"


def test_a_line_for_each_restart(tmp_path: Path) -> None:
    """A restart is read back as it was written; incomplete lines and those of other versions are skipped."""
    assert list(elastic_restarts.read(tmp_path)) == []
    elastic_restarts.record(tmp_path, WHY)
    with (tmp_path / "elastic.jsonl").open("a") as file:
        file.write('{"later": 1}\n[]\n{"job"')
    assert list(elastic_restarts.read(tmp_path)) == [WHY]
    assert str(WHY) == "rank 3 on n2: Exited with exit code 1 (ValueError: boom)"


def test_the_cause_is_not_secondary() -> None:
    """Among the reports of several agents, the first in time that is not secondary counts."""
    secondary = Restart("43.0.0", 1, 99.0, 0, "n1", "Exited with exit code 1", "x", secondary=True)
    killed = Restart("43.0.0", 1, 101.0, 2, "n2", "Killed")
    assert elastic_restarts.cause([secondary, killed, WHY]) == WHY and elastic_restarts.cause([secondary]) == secondary


def test_the_last_reported_step(tmp_path: Path) -> None:
    """The step is read from progress.json; it is -1 if the file is missing or unreadable."""
    assert elastic_restarts.furthest(tmp_path) == -1
    (tmp_path / "progress.json").write_text('{"step": 7}')
    assert elastic_restarts.furthest(tmp_path) == 7
    (tmp_path / "progress.json").write_text("[]")
    assert elastic_restarts.furthest(tmp_path) == -1


def test_an_earlier_start_is_set_aside(tmp_path: Path) -> None:
    """The error records and the hang report of an earlier start are moved, so that they do not count for the last."""
    (tmp_path / "errors").mkdir()
    record = error_records.ErrorRecord(1.0, 3, "n2", "ValueError: boom", "", job="43.0.0")
    (tmp_path / "errors/rank-3.json").write_text(record.to_json())
    hang = tmp_path / "hang/43.0.0"
    hang.mkdir(parents=True)
    (hang / hang_report.RECORD).write_text(hang_report.HangReport(silent_s=300.0).to_json())
    assert hang_report.left(tmp_path, "43", 0)
    elastic_restarts.set_aside(tmp_path, "43.0.0")
    assert list(error_records.read(tmp_path / "errors")) == [] and not hang_report.left(tmp_path, "43", 0)
    assert [found.record for found in error_records.read(tmp_path / "errors/before-43.0.0")] == [record]
    assert (tmp_path / "hang/before-43.0.0" / hang_report.RECORD).exists()
    elastic_restarts.set_aside(tmp_path, "43.0e1.0")  # with nothing to set aside


def test_the_world_of_an_agents_rank() -> None:
    """Ranks are read from torchrun, hosts and rank 0's host from the step; the step's task numbers cause no warning."""
    world = launchers.read(OURS)
    assert (world.launcher, world.rank, world.world_size, world.local_rank, world.local_world_size) == (
        *("torchrun", 3, 4, 1, 2),
    )
    assert (world.hosts, world.host, world.master_addr, world.job) == (("n1", "n2"), "n2", "n1", "43.0e1.0")
    assert world.warnings == () and len(world.master_ports) > 1 and 20000 not in world.master_ports[:1]


def test_a_torchrun_below_an_agents_rank_is_its_own() -> None:
    """The variables that a rank passes to a nested torchrun do not count for the inner ranks."""
    inner = launchers.read({**OURS, "TORCHELASTIC_RUN_ID": "mine", "RANK": "0", "WORLD_SIZE": "2"})
    assert (inner.job, inner.hosts, inner.master_ports) == ("mine.1", (), (20000,))
    assert any("SLURM_PROCID is 1" in line for line in inner.warnings)


def test_an_agents_rank_without_its_step() -> None:
    """A missing variable of the step is reported as with srun."""
    with pytest.raises(WorldError, match="SLURM_STEP_NODELIST is not set, expected the step's host names"):
        launchers.read({name: value for name, value in OURS.items() if name != "SLURM_STEP_NODELIST"})
