"""Like OpenFlamingo and ColossalAI: one program with several launchers, on 2 nodes x 2 ranks of the real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.minislurm import MiniSlurm
from tests.systems.jobs import (
    TOLERANCE,
    launched,
    off,
    with_horovod,
    with_mpirun,
    with_srun,
    with_torchrun,
)


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_openflamingo_launches(slurm: MiniSlurm, tmp_path: Path) -> None:
    """The same program trains to the same weights under srun, torchrun and Horovod's variables, with DDP and FSDP."""
    ways = {"slurm": with_srun, "torchrun": with_torchrun, "horovod": with_horovod}
    found = launched(slurm, tmp_path, "flamingo.py", ways)
    expected = found["slurm"][0]["ddp"]
    assert expected["losses"][-1] < expected["losses"][0] / 2, "it learns"
    for each in (rank for ranks in found.values() for rank in ranks):
        for wrap in ("ddp", "fsdp"):
            assert (each[wrap]["device"], each[wrap]["backend"]) == ("cpu", "gloo")
            assert off(each[wrap]["losses"], expected["losses"]) < TOLERANCE
            assert off(each[wrap]["weights"], expected["weights"]) < TOLERANCE
            assert each[wrap]["bits"] == found["slurm"][0][wrap]["bits"], "no bit differs between launchers and ranks"
    for ranks in found.values():
        whole = len(expected["weights"])
        assert [rank["ddp"]["held"] for rank in ranks] == [whole] * 4
        assert sum(rank["fsdp"]["held"] for rank in ranks) == whole, "FSDP divides the parameters"


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_colossalai_launches(slurm: MiniSlurm, tmp_path: Path) -> None:
    """Device, backend and seeds are the same under torchrun, srun and a real mpirun, and are set up exactly once."""
    ways = {"slurm": with_srun, "torchrun": with_torchrun, "openmpi": with_mpirun}
    found = launched(slurm, tmp_path, "colossal.py", ways)
    expected = found["slurm"][0]["draws"]
    for ranks in found.values():
        for each in ranks:
            assert (each["device"], each["backend"], each["sum"]) == ("cpu", ["gloo", "gloo"], 6.0)
            assert each["made"] == [each["rank"]], "one process group, by one call"
            assert each["same object"] and each["not seeded again"] and each["anew"]
            assert (
                "init was called twice with different arguments: seed was 1024 and is 1025 now"
                in each["another request"]
            )
            assert "backend was not given and is nccl now" in each["another backend"]
            assert "backend nccl needs a GPU" in each["nccl on a CPU"]
            assert each["draws"] == expected
        assert len({tuple(each["own"]) for each in ranks}) == 4, "by rank, each has its own"
        assert [each["own"] for each in ranks] == [each["own"] for each in found["slurm"]]
