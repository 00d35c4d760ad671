"""The launcher that a search gives to Hydra's sweepers; `hpcinit/config/search_space.py` registers and uses it.

Hydra accepts plugins from the namespace package hydra_plugins only. It imports every module there in every command,
except those whose name starts with an underscore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]


class BatchLauncher(Launcher):
    """Pass every batch of the sweeper, and the number of its first trial, to the 'task function'."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._launch = cast(Launch, task_function)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self._launch(job_overrides, initial_job_idx)
