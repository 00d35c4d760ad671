"""The values of `launch=`: the ways to start the ranks of a node. To add a way, add a line to STARTS and a module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """One way to start the ranks of a node.

    module: the Python module that each srun task runs (python -m).
    task_per_rank: True if each rank is an srun task, with its own output and exit status. False if srun starts one task
        per node, which starts the node's ranks and binds them to cores and GPUs.
    restarts_ranks: whether torchrun's agents can restart all ranks inside the job (launch.max_restarts). This needs
        additional ports.
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
