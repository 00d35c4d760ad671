"""Runs a sweeper that waits for results, such as Optuna's, and submits each of its batches as a sweep.

A Hydra sweeper passes combinations to a launcher, which returns the result of each. Here the launcher is
`hydra/launcher=hpcinit`. It gets a `Batches` object instead of the program's function.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hpcinit.base.errors import ConfigError, Failure, HpcinitError
from hpcinit.config import combinations, hydra_setup
from hpcinit.config.request import Composer, Ended, Prepare, Search

Launch = Callable[[Sequence[Sequence[str]], int], Sequence[JobReturn]]


@dataclass(frozen=True)
class Batches:
    """Submits the trials of a sweeper, batch by batch.

    launch_batch: a function that takes a batch and the number of its first trial, and returns the results.
    """

    launch_batch: Launch


def run(overrides: Sequence[str], composer: Composer, prepare: Prepare, search: Search) -> int:
    """Run the config's sweeper until it ends. Return the exit status.

    prepare: called with each request before it is submitted.
    search: submits the trials.

    Before a batch is submitted, raise ConfigError if one of its requests is invalid. Raise Failure if the sweeper
    fails.
    """
    with hydra_setup.initialized(composer.name):
        loader = GlobalHydra.instance().config_loader()
        config = GlobalHydra.instance().hydra.compose_config(  # type: ignore[union-attr]
            composer.name, list(overrides), RunMode.MULTIRUN, with_log_configuration=False
        )
    with tempfile.TemporaryDirectory(prefix="hpcinit-") as written:
        with open_dict(config):
            config.hydra.launcher = {"_target_": "hydra_plugins.hpcinit_launcher.HpcinitLauncher"}
            config.hydra.sweep.dir = written
        context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
        try:
            _sweep(config, context, _launch(config, overrides, composer, prepare, search))
            return search.end(Path(written))
        except Ended as end:
            return end.status
        except KeyboardInterrupt:
            return search.interrupted()


def _sweep(config: DictConfig, context: HydraContext, launch: Launch) -> None:
    target = config.hydra.sweeper._target_
    try:
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=cast(TaskFunction, Batches(launch)), config=config
        )
    except Exception as error:
        raise ConfigError(f"hydra/sweeper is {target}, which cannot be created: {error}") from None
    try:
        sweeper.sweep(_overrides(config, "task"))
    except (HpcinitError, Ended):
        raise
    except Exception as error:  # a sweeper's plugin may raise anything
        raise Failure(f"the sweeper {target} failed with {type(error).__name__}: {error}") from error


def _launch(
    config: DictConfig, overrides: Sequence[str], composer: Composer, prepare: Prepare, search: Search
) -> Launch:
    parsed = OverridesParser.create().parse_overrides(_overrides(config, "task"))
    fixed = {f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in parsed if not o.is_sweep_override()}
    # The sweeper needs the result, so wait=true overrides the user's value.
    common = [*_overrides(config, "hydra"), "wait=true"]

    def launch(batch: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
        labels = [
            " ".join(each for each in trial if each not in fixed) or f"trial {at}"
            for at, trial in enumerate(batch, first)
        ]
        chosen = [[*trial, *common] for trial in batch]
        requests = combinations.make(chosen, overrides, composer, prepare, first, labels)
        return [_return(trial, result) for trial, result in zip(batch, search.batch(requests), strict=True)]

    return launch


def _overrides(config: DictConfig, kind: str) -> list[str]:
    """Return the overrides on the command line, with interpolations not yet resolved.

    kind: 'task' or 'hydra'.
    """
    return cast(list[str], OmegaConf.to_container(config.hydra.overrides[kind], resolve=False))


def _return(trial: Sequence[str], result: object) -> JobReturn:
    failed = isinstance(result, Exception)
    done = JobReturn(overrides=trial, status=JobStatus.FAILED if failed else JobStatus.COMPLETED)
    done.return_value = result
    return done
