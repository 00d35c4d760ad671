"""Slurm's reasons in words."""

from __future__ import annotations

import pytest

from hpcinit.slurm.reasons import explain


# The first block as squeue of Slurm 22.05.8 printed them for jobs that asked for too much.
@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("PartitionConfig", "ask for less"),
        ("PartitionNodeLimit", "more nodes"),
        ("AssocMaxWallDurationPerJobLimit", "for one job"),
        ("AssocMaxNodePerJobLimit", "for one job"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "sinfo -R"),
        ("PartitionTimeLimit", "time limit"),
        ("BadConstraints", "no node has"),
        ("AssocGrpCpuLimit", "other jobs under the same limit"),
        ("AssocGrpCPUMinutesLimit", "budget"),
        ("QOSMaxJobsPerUserLimit", "other jobs under the same limit"),
        ("QOSMaxGRESPerJob", "for one job"),
        ("DependencyNeverSatisfied", "cancel it"),
        ("JobHeldUser", "scontrol release"),
        ("Resources", ""),
        ("Priority", ""),
        ("AWordOfTomorrow", ""),
    ],
)
def test_reasons_in_words(reason: str, words: str) -> None:
    """A reason that does not pass by itself gets its meaning and what to do; a plain one nothing."""
    assert words in explain(reason) and bool(explain(reason)) == bool(words)
