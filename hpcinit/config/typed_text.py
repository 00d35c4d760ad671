"""Keeps values exactly as the user typed them. YAML would change 1.10 to 1.1, and 010 to 8.

A program's arguments and environment variables are text, so they get the typed text instead of Hydra's value. On the
command line, Hydra's own parser provides the text. For YAML files, hydra_setup.ReadFiles does.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.grammar.gen.OverrideLexer import (  # type: ignore[attr-defined]  # each version of Hydra has antlr4 in another place
    CommonTokenStream,
    InputStream,
    OverrideLexer,
)
from hydra.grammar.gen.OverrideParser import OverrideParser
from omegaconf import DictConfig, ListConfig, OmegaConf

from hpcinit.config.request import PLAIN, KeyPath, as_text

# The keys whose values are text: those of the program, and those with lines of the script.
TEXTS = (("cluster", "env"), ("job", "env"), ("job", "args"), ("cluster", "modules"), ("cluster", "setup"))


class Typed(Override):
    """An override that passes each value to Hydra's sweeper exactly as the user typed it.

    Hydra's own class would reformat the values.
    """

    @classmethod
    def from_override(cls, override: Override) -> Typed:
        return cls(**{item.name: getattr(override, item.name) for item in fields(override)})

    def sweep_string_iterator(self) -> Iterator[str]:
        by_hydra = list(super().sweep_string_iterator())
        typed = _elements(str(self.input_line))
        return iter(typed if len(typed) == len(by_hydra) else by_hydra)

    def get_value_element_as_str(self, space_after_sep: bool = False) -> str:
        if self.is_delete():
            return str(super().get_value_element_as_str(space_after_sep))
        return self.get_value_string()


def _elements(line: str) -> list[str]:
    """Return the text of each element of a sweep (key=1,2 or key=choice(1,2)), a list (key=[1,2]) or a table.

    For a table, such as key={A: 1}, return the text of its values. Return [] for any other override.
    """
    parser: Any = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(line))))
    value = parser.override().value()
    if value is None:
        return []
    found = value.simpleChoiceSweep()
    if found is None:
        element = value.element()
        if table := element.dictContainer():
            values = [pair.element() for pair in table.dictKeyValuePair()]
            return [line[one.start.start : one.stop.stop + 1] for one in values]
        function = element.function()
        found = element.listContainer() or (function if function and function.ID().getText() == "choice" else None)
    return [line[one.start.start : one.stop.stop + 1] for one in found.element()] if found else []


def text_from(override: Override) -> str | list[Any] | dict[Any, Any] | None:
    """Return the text that the user typed as the value of an override, or None for a sweep.

    For a list or a table, return the text of each element. Quotes around strings are removed. Interpolations are not
    resolved.
    """
    value = override.value()
    line = str(override.input_line)
    if isinstance(value, list):
        texts = _elements(line)
        return [text if _is_rewritten(one) else one for one, text in zip(value, texts or value, strict=True)]
    if isinstance(value, dict):
        texts = _elements(line)
        texts = texts if len(texts) == len(value) else [*value.values()]  # a key is given twice
        return {key: text if _is_rewritten(one) else one for (key, one), text in zip(value.items(), texts, strict=True)}
    if not isinstance(value, PLAIN) or isinstance(value, str):
        return value if isinstance(value, str) else None
    text = override.get_value_string().strip()
    return as_text(value) if "(" in text else text  # int(1.5) calls a function of Hydra, which changes the value


def _as_typed(value: Any) -> Any:
    """Return whole numbers as text, also inside a list, and other values unchanged.

    Booleans stay unchanged, because str() would write True where the user typed true.
    """
    if isinstance(value, ListConfig):
        elements: Any = OmegaConf.to_container(value)
        return [_as_typed(element) for element in elements]
    return str(value) if type(value) is int else value


def _refers(text: object) -> bool:
    return isinstance(text, str) and "${" in text


def _is_rewritten(value: object) -> bool:
    return isinstance(value, PLAIN) and not isinstance(value, str)


class Texts:
    """A config in which overridden keys have the values exactly as the user typed them.

    Keys that refer to an overridden key get the typed value too.
    """

    def __init__(self, config: DictConfig, hydra: DictConfig) -> None:
        """Apply the overrides that Hydra has recorded to the config.

        config: the config as Hydra composed it, with interpolations not yet resolved.
        hydra: the node `hydra` of that config, which contains the overrides.
        """
        overrides: Any = OmegaConf.to_container(hydra.overrides.task)
        self._config = config
        self._has_texts = False  # then self._config is a copy without types
        self._keys: dict[str, None] = {}  # the keys that overrides set to a single value
        for override in OverridesParser.create().parse_overrides(overrides):
            if not (override.is_delete() or override.package or override.is_hydra_override()):
                self.set(override)

    def set(self, override: Override) -> None:
        """Set the key of an override to the text that the user typed.

        Ignore overrides that choose a file of a config group.
        """
        key, text = override.key_or_group, text_from(override)
        value = OmegaConf.select(self._config, key)
        if text is None or (isinstance(value, DictConfig) and not isinstance(text, dict)):
            return
        if not self._has_texts and not _refers(text) and text != _as_typed(value):
            values: Any = OmegaConf.to_container(self._config)
            self._config = OmegaConf.create(values, flags={"no_deepcopy_set_nodes": True})
            self._has_texts = True
        if self._has_texts:
            OmegaConf.update(self._config, key, text, force_add=True)
        if isinstance(text, str):
            self._keys[key] = None

    def typed(self, only: Collection[str] | None = None) -> dict[str, str]:
        """Return the typed text of each key that an override sets to a single value.

        only: the keys to return; None: all.
        """
        keys = self._keys if only is None else [key for key in only if key in self._keys]
        values = {key: OmegaConf.select(self._config, key) for key in keys}
        return {key: as_text(value) for key, value in values.items() if isinstance(value, PLAIN)}

    def texts_at(self, only: Collection[KeyPath] | None = None) -> dict[KeyPath, Any]:
        """Return the environment variables, the program's arguments and the script's lines as the user typed them.

        The result maps the path of each value in the config to the value. Other values, such as lists, are returned
        unchanged, because checks/values.py reports them.

        only: the paths to return; None: all.
        """
        found: dict[KeyPath, Any] = {}
        for parent in TEXTS:
            if only is not None and not any(place[:2] == parent for place in only):
                continue
            container = OmegaConf.select(self._config, ".".join(parent))
            written: Any = OmegaConf.to_container(container) if OmegaConf.is_config(container) else []
            items: Any = written.items() if isinstance(written, dict) else enumerate(written)
            for name, value in items:
                known = container[name] if _refers(value) else value
                place: KeyPath = (*parent, name)
                has_text = _refers(value) or isinstance(known, (bool, int))  # a float of a table
                found[place] = as_text(known) if has_text and isinstance(known, PLAIN) else known
        return found


def put(container: Any, path: KeyPath, value: Any) -> Any:
    """Return a copy of `container` in which the value at `path` is `value`."""
    if not path:
        return copy.copy(value)
    name = path[0]
    changed = copy.copy(container)
    if is_dataclass(container):
        setattr(changed, str(name), put(getattr(container, str(name)), path[1:], value))
    elif isinstance(container, list) and isinstance(name, int):
        changed[name] = put(container[name], path[1:], value)
    else:
        changed[name] = put(container.get(name), path[1:], value)
    return changed
