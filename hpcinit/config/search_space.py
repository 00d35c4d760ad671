"""A sweeper that waits for results, Optuna's for one: each batch that it asks for becomes requests.

Hydra's sweepers hand combinations to a launcher and get what each came to. Ours submits them as a sweep and waits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hpcinit.base.errors import ConfigError, Failure, HpcinitError
from hpcinit.config import combinations
from hpcinit.config.compose import Composer, Ended, Prepare, Search
from hpcinit.config.folders import folder
from hydra_plugins._hpcinit_search import BatchLauncher, Launch


def run(overrides: Sequence[str], composer: Composer, prepare: Prepare, search: Search) -> int:
    """Let the sweeper that the config names search to its end; the exit status.

    Raises ConfigError before a batch of which any request is wrong, and Failure where the sweeper gives up.
    """
    Plugins.instance().register(BatchLauncher)
    with hydra.initialize_config_dir(config_dir=str(folder()), version_base="1.3", job_name=composer.name):
        loader = GlobalHydra.instance().config_loader()
        config = GlobalHydra.instance().hydra.compose_config(  # type: ignore[union-attr]
            composer.name, list(overrides), RunMode.MULTIRUN, with_log_configuration=False
        )
    with tempfile.TemporaryDirectory(prefix="hpcinit-") as written:
        with open_dict(config):
            config.hydra.launcher = {"_target_": f"{BatchLauncher.__module__}.{BatchLauncher.__name__}"}
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
            hydra_context=context, task_function=cast(TaskFunction, launch), config=config
        )
    except Exception as error:
        raise ConfigError(f"hydra/sweeper is {target}, which cannot be made: {error}") from None
    try:
        sweeper.sweep(_words(config, "task"))
    except (HpcinitError, Ended):
        raise
    except Exception as error:  # of a plugin that we do not know: whatever it may be
        raise Failure(f"the sweeper {target} ended with {type(error).__name__}: {error}") from error


def _launch(
    config: DictConfig, overrides: Sequence[str], composer: Composer, prepare: Prepare, search: Search
) -> Launch:
    parsed = OverridesParser.create().parse_overrides(_words(config, "task"))
    fixed = {f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in parsed if not o.is_sweep_override()}
    # A result is waited for, whatever else was said.
    common = [*_words(config, "hydra"), "wait=true"]

    def launch(batch: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
        labels = [
            " ".join(w for w in words if w not in fixed) or f"trial {at}" for at, words in enumerate(batch, first)
        ]
        chosen = [[*words, *common] for words in batch]
        requests = combinations.of(chosen, overrides, composer, prepare, first, labels)
        return [_return(words, came) for words, came in zip(batch, search.batch(requests), strict=True)]

    return launch


def _words(config: DictConfig, kind: str) -> list[str]:
    """The command line's words, with their interpolations as they are."""
    return cast(list[str], OmegaConf.to_container(config.hydra.overrides[kind], resolve=False))


def _return(words: Sequence[str], came: object) -> JobReturn:
    failed = isinstance(came, Exception)
    done = JobReturn(overrides=words, status=JobStatus.FAILED if failed else JobStatus.COMPLETED)
    done.return_value = came
    return done
