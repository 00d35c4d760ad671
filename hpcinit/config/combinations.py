"""Splits a sweep into combinations with Hydra's own sweeper, and makes a request for each combination.

Hydra needs tens of milliseconds to compose a config. So for combinations that choose the same config groups, Hydra
composes only the first config. hpcinit copies it for the others and sets the keys that differ. Hydra composes all of
them if a copy might be wrong. tests/config/test_combinations.py compares the results.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from hpcinit.base.errors import ConfigError, HpcinitError
from hpcinit.config import hydra_errors, hydra_setup
from hpcinit.config.overrides import references
from hpcinit.config.request import PLAIN, Composer, KeyPath, Prepare, Request
from hpcinit.config.typed_text import Texts, Typed, put


class Searches(Exception):
    """Raised if the config's sweeper waits for the results of a batch before it chooses the next combinations."""


def requests(overrides: Sequence[str], composer: Composer, prepare: Prepare) -> list[Request]:
    """Return one prepared request per combination. Raise ConfigError with the problems of all combinations."""
    return make(split(overrides, composer), overrides, composer, prepare)


def make(
    combinations: Sequence[Sequence[str]],
    overrides: Sequence[str],
    composer: Composer,
    prepare: Prepare,
    first: int = 0,
    labels: Sequence[str] | None = None,
) -> list[Request]:
    """Return the requests of `combinations`, numbered from `first`.

    All combinations must have their overrides in the same order.

    overrides: the overrides on the command line.
    prepare: called with each request.
    labels: the names of the combinations. None: use the overrides that differ, and make the requests with Quick.
    """
    found: dict[str, list[str]] = {}
    quick, made = None, []
    if labels is not None:
        parameters = [[word for word in chosen if word not in overrides] for chosen in combinations]
    else:
        swept = [at for at, words in enumerate(zip(*combinations, strict=True)) if len(set(words)) > 1]
        quick = Quick(combinations, swept, composer)
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
    """Return the combinations that Hydra's own sweeper makes from the overrides and from hydra.sweeper.params.

    Raise Searches if the config names a different sweeper. Raise ConfigError if the sweep is invalid.
    """
    with hydra_setup.initialized(composer.name):
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parse(parser, overrides, composer.unusable)
        with suppress(*composer.unusable):  # an error here occurs in every combination, and is reported there
            fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
            own = hydra.compose(composer.name, fixed, return_hydra_config=True).hydra
            if not own.launcher._target_.endswith(".BasicLauncher"):
                raise ConfigError(
                    f"hydra/launcher is {own.launcher._target_}, but hpcinit submits sweeps itself: remove "
                    "hydra/launcher"
                )
            if not own.sweeper._target_.endswith(".BasicSweeper"):
                raise Searches
            params = [f"{k}={v}" for k, v in (own.sweeper.params or {}).items()]
            parsed = parse(parser, params, composer.unusable) + parsed
        for override in parsed:
            if override.is_interval_sweep() or (override.is_sweep_override() and override.is_hydra_override()):
                raise ConfigError(
                    f"{override.input_line}: a sweep needs a list of values, as in nodes=1,2, and cannot change "
                    "hydra.* keys"
                )
        typed: list[Override] = [Typed.from_override(override) for override in parsed]
        combinations = [list(chosen) for chosen in BasicSweeper.split_arguments(typed, None)[0]]
    if not combinations:
        raise ConfigError(f"{' '.join(overrides)}: the sweep has no combinations, because a range() or glob() is empty")
    return combinations


def parse(parser: OverridesParser, overrides: Sequence[str], unusable: tuple[type[Exception], ...]) -> list[Override]:
    """Return the overrides as Hydra parses them. Raise ConfigError with those that Hydra can't parse."""
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
    set_number(composed, number)
    return composer.request(composed, overrides, label)


REFERENCE = re.compile(
    r"\$\{([A-Za-z_][\w.]*)\}"
)  # ${job.name}; anything more complex is assumed to depend on every key
NUMBERED = re.compile(r"\$\{hydra:job\.(num|id)\}")  # set by Hydra, and known to us
NUMBER = re.compile(r"0|-?[1-9]\d*")


def set_number(composed: DictConfig, at: int) -> None:
    """Make `composed` the config behind ${hydra:...}, with the job number `at`."""
    with read_write(composed.hydra), open_dict(composed.hydra):
        composed.hydra.job.num, composed.hydra.job.id = at, str(at)
    HydraConfig.instance().set_config(composed)


class Quick:
    """Makes the requests of a sweep quickly.

    Hydra composes one request for each choice of config groups, such as cluster=x. hpcinit derives the other requests
    with the same choice from that request.
    """

    def __init__(self, combinations: Sequence[Sequence[str]], swept: Sequence[int], composer: Composer) -> None:
        self._composer, self._bases = composer, dict[tuple[str, ...], "_Base | None"]()
        self._parsed: dict[str, Override] = {}
        self._values, self._groups = self._places(combinations, swept)
        self._few = len(combinations) < 3  # too few: making a base takes as long as composing a combination

    def _places(self, combinations: Sequence[Sequence[str]], swept: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the positions of the overrides that hpcinit can change, and of those that only Hydra can change."""
        with hydra_setup.initialized(self._composer.name):
            loader = GlobalHydra.instance().config_loader()
            parser = OverridesParser.create(config_loader=loader)
            try:
                keys = [parser.parse_override(word).key_or_group for word in combinations[0]]
                for at in swept:
                    self._parsed |= _read({chosen[at] for chosen in combinations}, parser.parse_override)
            except self._composer.unusable:
                return [], list(swept)  # Hydra composes this combination in full, which reports the error
            group = loader.repository.group_exists  # type: ignore[attr-defined]
            values = [at for at in swept if not group(keys[at]) and _alone(keys, at)]
            values = [at for at in values if _alike([self._parsed[chosen[at]] for chosen in combinations])]
        return values, [at for at in swept if at not in values]

    def request(self, chosen: Sequence[str], overrides: Sequence[str], at: int, label: str) -> Request | None:
        """Return the request for a combination, or None if Hydra must compose it.

        chosen: the overrides of the combination.
        overrides: the overrides on the command line.
        at, label: the number and the name of the combination.
        """
        if self._few or not self._values:
            return None
        choice = tuple(chosen[place] for place in self._groups)
        if choice not in self._bases:
            swept = [self._parsed[chosen[place]] for place in self._values]
            self._bases[choice] = _Base.compose(chosen, overrides, swept, self._composer)
        base = self._bases[choice]
        return base.varied([self._parsed[chosen[place]] for place in self._values], at, label) if base else None


def _read(overrides: Set[str], parse: Callable[[str], Override]) -> dict[str, Override]:
    """Return each override as Hydra parses it.

    Parsing takes half a millisecond. If the overrides of a key are numbers, as in key=1, key=2, only the first is
    parsed, and the others are copies of it with a different number.
    """
    found: dict[str, Override] = {}
    first: dict[str, Override] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if NUMBER.fullmatch(value) and key in first:
            found[override] = replace(first[key], _value=int(value), input_line=override)
            continue
        found[override] = parse(override)
        if NUMBER.fullmatch(value):
            first[key] = found[override]
    return found


def _alone(keys: Sequence[str], at: int) -> bool:
    """Return whether no other override sets the key at position `at`, one of its children or one of its parents."""
    mine = f"{keys[at]}."
    others = [f"{key}." for place, key in enumerate(keys) if place != at]
    return not any(mine.startswith(other) or other.startswith(mine) for other in others)


def _alike(overrides: Sequence[Override]) -> bool:
    """Return whether all overrides set the same key in the same way, without interpolations.

    Their values must all be plain values, or all be lists of plain values.
    """
    if len({(o.type, o.key_or_group, o.package) for o in overrides}) > 1:
        return False
    if overrides[0].package is not None or overrides[0].is_delete() or overrides[0].is_hydra_override():
        return False
    values = [override.value() for override in overrides]
    if all(isinstance(value, list) for value in values):
        return all(_plain(item) for value in values for item in value)  # type: ignore[union-attr]
    return all(_plain(value) for value in values)


def _plain(value: object) -> bool:
    return isinstance(value, PLAIN) and not (isinstance(value, str) and ("${" in value or value == "???"))


@dataclass(frozen=True)
class _Base:
    """A combination that Hydra composed. hpcinit derives similar combinations from it.

    written: the config without its node `hydra`, and with interpolations not yet resolved.
    hydras: the config with its node `hydra`.
    made: the request for this combination.
    swept: the keys whose values differ between combinations, with their paths.
    changing: the keys whose values depend on a swept key, with their paths.
    numbered: whether a value refers to ${hydra:job.num} or ${hydra:job.id}.
    """

    written: DictConfig
    hydras: DictConfig
    made: Request
    swept: Mapping[str, KeyPath]
    changing: Mapping[str, KeyPath]
    numbered: bool
    typed: Texts

    @classmethod
    def compose(
        cls, chosen: Sequence[str], overrides: Sequence[str], swept: Sequence[Override], composer: Composer
    ) -> _Base | None:
        """Compose a combination with Hydra. Return None if hpcinit cannot derive other combinations from it.

        chosen: the overrides of the combination.
        overrides: the overrides on the command line.
        swept: the overrides in `chosen` that hpcinit changes to derive other combinations.
        """
        try:
            composed = composer.compose(chosen)
            hydras = composed.copy()
            made = composer.request(composed.copy(), overrides, "")
        except HpcinitError:
            return None  # Hydra composes this combination in full, which reports the error
        with open_dict(composed):
            del composed["hydra"]
        typed = Texts(composed, hydras.hydra)
        raw = OmegaConf.to_container(composed)
        texts = dict(references(raw))
        if any("${hydra:" in NUMBERED.sub("", text) for text in texts.values()):
            return None
        keys = [override.key_or_group for override in swept]
        changing = {key: _path(key) for key in _depending(texts, keys)}
        paths = {key: _path(key) for key in keys}
        if any(_at(raw, path) != texts[key] for key, path in changing.items()):  # a key's name contains a dot
            return None
        if any(not _leaf(_at(made.document, path)) for path in changing.values()):
            return None
        numbered = any(NUMBERED.search(text) for text in texts.values())
        return cls(composed, hydras, made, paths, changing, numbered, typed)

    def varied(self, swept: Sequence[Override], at: int, label: str) -> Request | None:
        config, document = copy.copy(self.made.config), dict(self.made.document)
        config.job, document["job"] = copy.copy(config.job), dict(document["job"])
        try:
            for override in swept:
                add = override.is_add() or override.is_force_add()
                OmegaConf.update(self.written, override.key_or_group, override.value(), merge=True, force_add=add)
                self.typed.set(override)
            if self.numbered:
                set_number(self.hydras, at)
            for key, path in (*self.swept.items(), *self.changing.items()):
                value = OmegaConf.select(self.written, key, throw_on_missing=True)
                value = OmegaConf.to_container(value) if OmegaConf.is_list(value) else value
                if not _leaf(value) and not (key in self.swept and isinstance(value, list)):
                    return None
                config, document = put(config, path, value), put(document, path, value)
            places = {**self.swept, **self.changing}
            for path, text in self.typed.texts_at(places.values()).items():
                config, document = put(config, path, text), put(document, path, text)
        except OmegaConfBaseException:
            return None
        unread = dict(self.made.unread)
        typed = {**self.made.typed, **self.typed.typed(places)}
        return Request(config, document, label, list(self.made.warnings), typed=typed, unread=unread)


def _depending(texts: Mapping[str, str], swept: Sequence[str]) -> list[str]:
    """Return the keys whose text might refer to a swept key, directly or through other keys."""
    found = {key for key, text in texts.items() if "${" in REFERENCE.sub("", text)}
    while True:
        more = {
            key
            for key, text in texts.items()
            if key not in found and any(_touches(name, other) for name in REFERENCE.findall(text)
                                        for other in (*swept, *found))
        }  # fmt: skip
        if not more:
            return sorted(found - set(swept))
        found |= more


def _touches(one: str, other: str) -> bool:
    other = other.partition("[")[0]
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _path(key: str) -> KeyPath:
    """Return the parts of a key: ('job', 'args', 1) for 'job.args[1]'."""
    parts = re.findall(r"[^.\[\]]+|\[\d+\]", key)
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def _leaf(value: object) -> bool:
    return isinstance(value, PLAIN)


def _at(container: Any, path: KeyPath) -> Any:
    for part in path:
        if not (isinstance(container, dict) and part in container) and not isinstance(part, int):
            return ...
        container = container[part]
    return container
