"""What is refused before the queue, with the key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcinit.config import checks
from hpcinit.config.compose import compose


def found(*overrides: str) -> list[str]:
    return checks.problems(compose(overrides))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_shipped_choices_are_right() -> None:
    """A plain request has no problem."""
    assert found() == [] and found("cluster=mini", "nodes=4") == [] and found("cluster=example") == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nodes=0"], "nodes is 0, expected 1 or more"),
        (["nodes=-1"], "nodes is -1, expected 1 or more"),
        (["ranks_per_node=0"], "ranks_per_node is 0, expected 1 or more"),
        (["time_min=0"], "time_min is 0, expected 1 or more"),
        (["mem_gb=-1"], "mem_gb is -1.0, expected 0 or more"),
        (["cluster.engine=pbs"], "cluster.engine is 'pbs', expected one of: slurm, local"),
        (["cluster.gpu_flag=gpus"], "cluster.gpu_flag is 'gpus', expected one of: gpus-per-node, gres, null"),
        (["comm.backend=mpi"], "comm.backend is 'mpi', expected one of: auto, nccl, gloo"),
        (["comm.device_id=maybe"], "comm.device_id is 'maybe', expected one of: never, auto, always"),
        (["seed_by=node"], "seed_by is 'node', expected one of: same, rank, data"),
        (["name='../x'"], "name is '../x', expected letters"),
        (["name='%x'"], "name is '%x', expected letters"),
        (["+cluster.env.A-B=1"], "cluster.env has 'A-B', expected a name of letters"),
        (["comment='a\nb'"], "comment is 'a\\nb': it contains the control character '\\n'"),
        (["+cluster.env.A='x\0y'"], "contains the control character '\\x00'"),
        (["comment='a\u2028b'"], "contains the control character '\\u2028'"),
        (["comment='a\x85b'"], "contains the control character '\\x85'"),
        (['comment="it\'s"'], "contains an unbalanced '"),
        (["partition='a\"'"], 'contains an unbalanced "'),
        (["runs_dir='a\nb'"], "runs_dir is 'a\\nb'"),
        (["job.args=['a\0b']"], "job.args contains a NUL"),
        (["+cluster.sbatch.nodes=3"], "cluster.sbatch.nodes: use nodes instead"),
        (["+cluster.sbatch.output=x"], "cluster.sbatch.output: use runs_dir instead"),
        (["cluster=mini", "+cluster.srun.kill-on-bad-exit=0"], "use launch.kill_on_bad_exit instead"),
        (["+cluster.sbatch.parsable=true"], "cluster.sbatch.parsable: hpcinit sets it itself"),
        (["+cluster.sbatch={--mail-type: x}"], "expected the long name of an option without its dashes"),
        (["+cluster.sbatch.x=1"], "expected the long name"),
        (["+cluster.sbatch.licenses=[a]"], "cluster.sbatch.licenses is ['a'], expected one value"),
        (["+cluster.srun.mpi=none"], "cluster local has no srun"),
        (["job.script=train.py"], "job has script and module, expected exactly one"),
        (["job=program"], "job has none of script, module, command, expected exactly one"),
        (["job.module=null", "job.script=nope.py"], "job.script is 'nope.py', expected a file"),
        (["job.workdir=/nowhere"], "job.workdir is '/nowhere', expected a folder that exists"),
        (["cluster=mini", "nodes=5"], "nodes=5, but partition 'main' of cluster mini has at most 4"),
        (["cluster=mini", "time_min=61"], "time_min=61, but partition 'main' of cluster mini has at most 60"),
        (["cluster=mini", "ranks_per_node=9"], "ranks_per_node=9, but a node of cluster mini has 8 GPUs"),
        (["cluster=mini", "cpus_per_rank=3"], "8 ranks x 3 cores = 24 cores per node, but a node of cluster mini has 16"),
        (["nodes=2", "parallel.tp=4"], "tp 4 = 4 ranks, which does not divide 2 nodes x 1 rank = 2; nearest: tp 1"),
        (["nodes=4", "parallel.dp_replicate=2"], "dp_replicate 2 = 2 ranks, but 4 nodes x 1 rank = 4; dp_replicate 4; nodes=2"),
        (["parallel.tp=-1"], "parallel.dp_replicate and parallel.tp are -1"),
        (["parallel.tp=0"], "parallel.tp is 0, expected 1 or more, or -1"),
        (["cluster.host_template='{node}-ib'"], "the host template '{node}-ib' is not understood, expected {host} once"),
        (["comm.timeout_base_s=0"], "comm.timeout_base_s is 0, expected more than 0"),
        (["comm.collective_timeout_s=-5"], "comm.collective_timeout_s is -5, expected more than 0"),
        (["comm.timeout_per_node_s=-1"], "comm.timeout_per_node_s is -1, expected 0 or more"),
        (["seed=99999999999999999999"], "seed is 99999999999999999999, expected at most 9223372036854775807"),
        (["+cluster.sbatch.ntasks_per_node=9"], "cluster.sbatch has 'ntasks_per_node', expected the long name"),
    ],
)  # fmt: skip
def test_refused_with_the_key_to_change(overrides: list[str], message: str) -> None:
    """Each wrong request is refused by exactly one message that names the key."""
    (problem,) = found(*overrides)
    assert message in problem


def test_all_problems_in_one_pass() -> None:
    """Problems of different kinds are reported together."""
    assert len(found("nodes=0", "name='a b'", "comment='a\nb'", "comm.backend=x")) == 4


def test_arguments_of_the_program_may_hold_anything() -> None:
    """job.args never reach the script, so quotes and newlines in them are fine."""
    assert found("job.args=['it\\'s', 'a\nb', '$(x)']") == []
