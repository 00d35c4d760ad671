"""The environment of a rank that was forked by the one Slurm task of its node: the variables that srun would have set.

tests/test_fork.py compares recordings of both: one Slurm task per rank, and forked ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcinit.base.errors import RequestError
from hpcinit.world import number

DO = "start one task per node: srun --ntasks-per-node=1, as the run folder's job.sh does"
# Variables that belong to the fork server only: MPI's process managers do not know its ranks, and the CPU and GPU
# bindings are the server's. SLURM_UMASK stays: it distinguishes a task from a batch script.
NOT_THEIRS = ("PMI_", "PMI2_", "PMIX_", "SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURMD_TRES_BIND", "SLURM_TRES_BIND")


@dataclass(frozen=True)
class Node:
    """The task of one node and its ranks. rank: 0 to nodes - 1, from SLURM_NODEID. host: Slurm's name of the node."""

    rank: int
    nodes: int
    ranks_per_node: int
    host: str

    @property
    def first(self) -> int:
        """The rank of this node's first rank."""
        return self.rank * self.ranks_per_node


def node(env: Mapping[str, str], nodes: int, ranks_per_node: int) -> Node:
    """Return this task's node, checked against the run's size. Raise RequestError if it is not one task per node."""
    tasks = number(env, "SLURM_STEP_NUM_TASKS", DO)
    if tasks != nodes or env.get("SLURM_LOCALID") != "0":
        raise RequestError(
            f"the step has {tasks} tasks (SLURM_STEP_NUM_TASKS) and this is number {env.get('SLURM_LOCALID')} of its "
            f"node (SLURM_LOCALID), but the run has {nodes} nodes x {ranks_per_node} ranks: {DO}"
        )
    return Node(number(env, "SLURM_NODEID", DO), nodes, ranks_per_node, env.get("SLURMD_NODENAME", ""))


def environment(env: Mapping[str, str], here: Node, local_rank: int, pid: int, cpus: int | None) -> dict[str, str]:
    """Return the whole environment of a rank, from its parent's. Ranks are numbered by node, in any task order."""
    per_node, world = str(here.ranks_per_node), str(here.nodes * here.ranks_per_node)
    counts = per_node if here.nodes == 1 else f"{per_node}(x{here.nodes})"
    found = {name: value for name, value in env.items() if not name.startswith(NOT_THEIRS)}
    found |= {
        "SLURM_PROCID": str(here.first + local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_GTIDS": ",".join(str(here.first + other) for other in range(here.ranks_per_node)),
        "SLURM_DISTRIBUTION": "block",
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), world),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts),
    }
    if "SLURM_NTASKS_PER_NODE" in env:
        found["SLURM_NTASKS_PER_NODE"] = per_node
    if "SLURM_TASK_PID" in env:  # not set by the local engine
        found["SLURM_TASK_PID"] = str(pid)
    if "SLURM_CPUS_PER_TASK" in env and cpus is not None:
        found["SLURM_CPUS_PER_TASK"] = str(cpus)
        if env.get("SLURM_TRES_PER_TASK", "").startswith("cpu="):  # since Slurm 24.05
            found["SLURM_TRES_PER_TASK"] = f"cpu={cpus}"
    return found
