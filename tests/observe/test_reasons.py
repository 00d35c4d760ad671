"""The explanations of Slurm's reasons for a waiting job."""

from __future__ import annotations

import pytest

from hpcinit.slurm.reasons import explain


# squeue of Slurm 22.05.8 printed the first block for jobs that request too much.
@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("PartitionConfig", "request less"),
        ("PartitionNodeLimit", "more nodes"),
        ("AssocMaxWallDurationPerJobLimit", "per job"),
        ("AssocMaxNodePerJobLimit", "per job"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "sinfo -R"),
        ("PartitionTimeLimit", "time limit"),
        ("BadConstraints", "no node fits"),
        ("AssocGrpCpuLimit", "other jobs under the same limit"),
        ("AssocGrpCPUMinutesLimit", "budget"),
        ("QOSMaxJobsPerUserLimit", "other jobs under the same limit"),
        ("QOSMaxGRESPerJob", "per job"),
        ("DependencyNeverSatisfied", "cancel the waiting job"),
        ("JobHeldUser", "scontrol release"),
        ("Resources", ""),
        ("Priority", ""),
        ("ANewReason", ""),
    ],
)
def test_explanations_of_reasons(reason: str, text: str) -> None:
    """A reason that needs an action is explained; an obvious one is not."""
    assert text in explain(reason) and bool(explain(reason)) == bool(text)
