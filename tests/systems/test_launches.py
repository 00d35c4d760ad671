"""Like OpenFlamingo and ColossalAI: the same programs with several launchers, on 2 nodes x 2 ranks of the real Slurm."""

from __future__ import annotations

import pytest

from tests.minislurm import MiniSlurm
from tests.systems.jobs import (
    TOLERANCE,
    Found,
    launched,
    off,
    with_horovod,
    with_mpirun,
    with_srun,
    with_torchrun,
)


@pytest.fixture(scope="module")
def found(slurm: MiniSlurm, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of both programs under four launchers."""
    ways = {"slurm": with_srun, "torchrun": with_torchrun, "horovod": with_horovod, "openmpi": with_mpirun}
    return launched(slurm, tmp_path_factory.mktemp("launches"), ways, ("flamingo", "colossal"))


@pytest.mark.slurm
@pytest.mark.more
@pytest.mark.timeout(300)
def test_openflamingo_launches(found: Found) -> None:
    """With DDP and FSDP, a program trains to the same weights under srun, torchrun, mpirun and Horovod's variables."""
    flamingo = found["flamingo"]
    expected = flamingo["slurm"][0]["ddp"]
    assert expected["losses"][-1] < expected["losses"][0] / 2, "it learns"
    for each in (rank for ranks in flamingo.values() for rank in ranks):
        for wrap in ("ddp", "fsdp"):
            assert (each[wrap]["device"], each[wrap]["backend"]) == ("cpu", "gloo")
            assert off(each[wrap]["losses"], expected["losses"]) < TOLERANCE
            assert off(each[wrap]["weights"], expected["weights"]) < TOLERANCE
            assert each[wrap]["bits"] == flamingo["slurm"][0][wrap]["bits"], (
                "no bit differs between launchers and ranks"
            )
    for ranks in flamingo.values():
        whole = len(expected["weights"])
        assert [rank["ddp"]["held"] for rank in ranks] == [whole] * 4
        assert sum(rank["fsdp"]["held"] for rank in ranks) == whole, "FSDP divides the parameters"


@pytest.mark.slurm
@pytest.mark.more
@pytest.mark.timeout(300)
def test_colossalai_launches(found: Found) -> None:
    """Device, backend and seeds are the same with every launcher, and are set up exactly once."""
    colossal = found["colossal"]
    expected = colossal["slurm"][0]["draws"]
    for ranks in colossal.values():
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
        assert [each["own"] for each in ranks] == [each["own"] for each in colossal["slurm"]]
