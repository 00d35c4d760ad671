"""Composes a Config from overrides: without Hydra where that is certain to give the same result, else with Hydra."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcinit.config import plain_config
from hpcinit.config.request import Prepare, Search, Task
from hpcinit.config.schema import Config


def main(line: Sequence[str], prepare: Prepare, task: Task, search: Callable[[], Search] | None = None) -> int:
    """Compose and `prepare` every request, then call `task` with all: one, or with --multirun one per combination.

    line: Hydra's command line, including flags such as --cfg, --help and --multirun. search: returns the results to a
    sweeper that waits for them; None if searching is not supported.
    Return the task's exit status. Raise ConfigError with the problems of all requests before `task` is called.
    """
    if (request := plain_config.request(line)) is not None:
        prepare(request)
        return task([request])
    from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

    return hydra_compose.main(line, prepare, task, search)


def compose(overrides: Sequence[str]) -> Config:
    """Return the Config for these overrides. Raise ConfigError with every problem at once."""
    if (request := plain_config.request(overrides)) is not None:
        return request.config
    from hpcinit.config import hydra_compose  # noqa: PLC0415 - importing Hydra is slow

    return hydra_compose.compose(overrides)
