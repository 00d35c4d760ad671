"""The values of `launch=`: the ways to start the ranks of a node. To add one, add a line here and a module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """One way to start the ranks of a node.

    module: the Python module that each srun task runs (python -m).
    task_per_rank: True if each rank is a separate srun task, with its own output and exit status. False if one task per
        node starts and ends the node's ranks, and binds them to cores and GPUs.
    restarts_ranks: whether agents can restart all ranks inside the job (launch.max_restarts). That needs more ports.
    """

    module: str
    task_per_rank: bool = False
    restarts_ranks: bool = False

    def tasks_per_node(self, ranks: int) -> int:
        """Return how many tasks srun starts on a node that has `ranks` ranks."""
        return ranks if self.task_per_rank else 1

    def ranks_per_task(self, ranks: int) -> int:
        return ranks // self.tasks_per_node(ranks)


STARTS = {
    "srun": Start("hpcinit.run", task_per_rank=True),
    "fork": Start("hpcinit.fork"),
    "torchrun": Start("hpcinit.elastic", restarts_ranks=True),
}
