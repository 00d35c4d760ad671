"""Composes a Config from overrides with Hydra. Hydra is imported only when a config is composed."""

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
    """Compose one request, or one per combination with --multirun. Call `task` with all requests.

    Return the exit status of `task`. If any request has problems, raise ConfigError with all of them before `task` is
    called.

    line: Hydra's command line, including flags such as --cfg, --help and --multirun.
    prepare: called with each request before `task`.
    search: returns the object that submits a sweeper's trials. None: refuse sweepers that wait for results.
    cluster_required: on a machine with Slurm, refuse a request without a cluster instead of running it locally.
    """
    from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

    return hydra_compose.main(line, prepare, task, search, cluster_required)


def compose(overrides: Sequence[str]) -> Config:
    """Return the Config for these overrides. Raise ConfigError with all problems together."""
    from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

    return hydra_compose.compose(overrides)
