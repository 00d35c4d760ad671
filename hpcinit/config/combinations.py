"""Splits a sweep into combinations, with Hydra's own sweeper, and makes a request for each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from hpcinit.base.errors import ConfigError, HpcinitError
from hpcinit.config import hydra_errors, search_path, variations
from hpcinit.config.request import Composer, Prepare, Request
from hpcinit.config.typed_text import Typed


class Searches(Exception):
    """Raised for a sweep whose combinations are chosen by a sweeper that waits for results."""


def requests(overrides: Sequence[str], composer: Composer, prepare: Prepare) -> list[Request]:
    """Return one request per combination, composed and prepared. Raise ConfigError with the problems of all."""
    return of(split(overrides, composer), overrides, composer, prepare)


def of(
    combinations: Sequence[Sequence[str]],
    overrides: Sequence[str],
    composer: Composer,
    prepare: Prepare,
    first: int = 0,
    labels: Sequence[str] | None = None,
) -> list[Request]:
    """Return the requests of `combinations`, numbered from `first`. All have their overrides in the same order.

    labels: their names. Without labels, each is named by what differs, and composed as a variation of another.
    """
    found: dict[str, list[str]] = {}
    quick, made = None, []
    if labels is not None:
        parameters = [[word for word in chosen if word not in overrides] for chosen in combinations]
    else:
        swept = [at for at, words in enumerate(zip(*combinations, strict=True)) if len(set(words)) > 1]
        quick = variations.Quick(combinations, swept, composer)
        parameters = [[chosen[at] for at in swept] for chosen in combinations]
        labels = [" ".join(words) for words in parameters]
    for number, (chosen, label, words) in enumerate(zip(combinations, labels, parameters, strict=True), first):
        try:
            request = quick.request(chosen, overrides, number, label) if quick else None
            request = request or _full(chosen, overrides, number, label, composer)
            made.append(replace(request, number=number, parameters=words))
            prepare(made[-1])
        except HpcinitError as error:
            for problem in getattr(error, "problems", [str(error)]):
                found.setdefault(problem, []).append(label)
    if found:
        raise ConfigError(*hydra_errors.once_each(found, len(combinations)))
    return made


def split(overrides: Sequence[str], composer: Composer) -> list[list[str]]:
    """Return the combinations that Hydra's own sweeper makes of 1,2, range(), choice(), glob() and its params.

    Raise Searches if the config names another sweeper. Raise ConfigError for an invalid sweep.
    """
    with search_path.initialized(composer.name):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parse(parser, overrides, composer.unusable)
        with suppress(*composer.unusable):  # an error here occurs in every combination, and is reported there
            fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
            own = hydra.compose(composer.name, fixed, return_hydra_config=True).hydra
            if not own.launcher._target_.endswith(".BasicLauncher"):
                raise ConfigError(
                    f"hydra/launcher is {own.launcher._target_}, expected the default: hpcinit submits sweeps itself; "
                    "remove it"
                )
            if not own.sweeper._target_.endswith(".BasicSweeper"):
                raise Searches
            params = [f"{k}={v}" for k, v in (own.sweeper.params or {}).items()]
            parsed = parse(parser, params, composer.unusable) + parsed
        for override in parsed:
            if override.is_interval_sweep() or (override.is_sweep_override() and override.is_hydra_override()):
                raise ConfigError(f"{override.input_line}: expected a list of values, as in 1,2, for a key of hpcinit")
        typed: list[Override] = [Typed.of(override) for override in parsed]
        combinations = [list(chosen) for chosen in BasicSweeper.split_arguments(typed, None)[0]]
    if not combinations:
        raise ConfigError(f"{' '.join(overrides)}: the sweep has no combinations, because a range() or glob() is empty")
    return combinations


def parse(parser: OverridesParser, overrides: Sequence[str], unusable: tuple[type[Exception], ...]) -> list[Override]:
    """Return each override as Hydra parses it. Raise ConfigError with all that it cannot parse."""
    parsed, wrong = [], []
    for override in overrides:
        try:
            parsed += parser.parse_overrides([override])
        except unusable as error:
            wrong.append(hydra_errors.sentence(error, override))
    if wrong:
        raise ConfigError(*wrong)
    return parsed


def _full(chosen: Sequence[str], overrides: Sequence[str], number: int, label: str, composer: Composer) -> Request:
    composed = composer.compose(chosen)
    variations.number(composed, number)
    return composer.request(composed, overrides, label)
