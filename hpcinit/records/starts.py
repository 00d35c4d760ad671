"""The values of launch=: how the ranks of a node are started. To add one, add a line here and its module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Start:
    """One way to start ranks.

    module: what each task of srun runs, as python -m. task_per_rank: each rank is a task of srun, with its own output
    and exit status. Otherwise one task per node starts and ends the ranks of its node, and binds them to cores and
    GPUs. restarts_ranks: agents restart all ranks inside the job (launch.max_restarts), which needs more ports.
    """

    module: str
    task_per_rank: bool = False
    restarts_ranks: bool = False

    def tasks_per_node(self, ranks: int) -> int:
        """Return how many tasks srun starts on a node with `ranks` ranks."""
        return ranks if self.task_per_rank else 1

    def ranks_per_task(self, ranks: int) -> int:
        return ranks // self.tasks_per_node(ranks)


STARTS = {
    "srun": Start("hpcinit.run", task_per_rank=True),
    "fork": Start("hpcinit.fork"),
    "torchrun": Start("hpcinit.elastic", restarts_ranks=True),
}
