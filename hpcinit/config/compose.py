"""Composes a Config from overrides with Hydra, which is imported only when a config is composed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcinit.config.request import Prepare, Search, Task
from hpcinit.config.schema import Config


def main(
    line: Sequence[str],
    prepare: Prepare,
    task: Task,
    search: Callable[[], Search] | None = None,
    *,
    cluster_required: bool = False,
) -> int:
    """Compose and `prepare` every request, then call `task` with all: one, or with --multirun one per combination.

    line: Hydra's command line, including flags such as --cfg, --help and --multirun. search: returns the results to a
    sweeper that waits for them, or None if searching is not supported. cluster_required: on a machine with Slurm, a
    request that chooses no cluster is an error instead of a job on this machine.

    Return the exit status of `task`. Raise ConfigError with the problems of all requests before `task` is called.
    """
    from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

    return hydra_compose.main(line, prepare, task, search, cluster_required)


def compose(overrides: Sequence[str]) -> Config:
    """Return the Config for these overrides. Raise ConfigError with every problem at once."""
    from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

    return hydra_compose.compose(overrides)
