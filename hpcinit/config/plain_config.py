"""Composes the config of an ordinary submission without Hydra, whose import and composition take most of the time.

It reads the same YAML in the same order and merges it into the defaults of the schema. `request` returns None wherever
the result of Hydra could differ: sweeps, flags, `+key`, lists and quotes in overrides, defaults lists in a group's
file, interpolations other than `${key}` and `${oc.env:NAME}`, plugins that may add config folders, and every mistake.
Hydra then composes the config, and reports the mistake. tests/config/test_plain_config.py compares both.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from hpcinit.base.errors import ConfigError
from hpcinit.config import default_cluster, folders, spellings
from hpcinit.config import overrides as command_line
from hpcinit.config.request import NAME, Request, variable_text
from hpcinit.config.schema import MISSING, Config

SCHEMA = "hpcinit_schema"  # the first of the primary config's defaults
DEFAULT_CLUSTER = "${hpcinit_default_cluster:}"
OVERRIDE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)=(.*)", re.ASCII)
# Values that have the same meaning in Hydra's grammar of overrides and here.
INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)", re.ASCII)
NUMBER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
TEXT = re.compile(r"[A-Za-z_/][\w/.-]*", re.ASCII)
QUOTED = re.compile(r"'([^'\\$]*)'")
WORDS = {"true": True, "false": False, "null": None}
NUMBERS = {"nan", "inf"}
CHOICE = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}", re.ASCII)
VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}", re.ASCII)
LONGEST_CHAIN = 8  # of keys that refer to each other
# Plugins that add nothing, or only to the group hydra. Any other may add a folder with configs.
PLUGINS = {
    *("hpcinit_launcher", "hydra_ax_sweeper", "hydra_colorlog", "hydra_joblib_launcher", "hydra_nevergrad_sweeper"),
    *("hydra_optuna_sweeper", "hydra_ray_launcher", "hydra_rq_launcher", "hydra_submitit_launcher"),
}


class Unsure(Exception):
    """Hydra may compose something else than this module would, or report a mistake."""


def request(line: Sequence[str]) -> Request | None:
    """Return the request for a command line without flags; None if Hydra has to compose it."""
    if any(word[:1] in "-+~" or "=" not in word for word in line):
        return None
    try:
        words = command_line.with_quoted_lists(spellings.translate(line, ()))
        values = _composed(words)
        document = {item.name: _resolved(hint, values[item.name], values) for item, hint in _keys(Config)}
        for table in ("cluster", "job"):
            if any(REFERENCE.search(str(text)) for text in [*values[table]["env"].values(), *values["job"]["args"]]):
                raise Unsure  # it may refer to a number that the user typed in another way
            env = document[table]["env"]
            document[table]["env"] = {name: variable_text(value) for name, value in env.items()}
        split = [word.partition("=") for word in words]
        split = [one for one in split if not isinstance(document.get(one[0]), dict)]
        typed = {key: text if QUOTED.fullmatch(text) is None else text[1:-1] for key, _, text in split}
        repeated = list(command_line.repeated(words))
        return Request(_made(Config, document), document, "", repeated, typed=typed)
    except (Unsure, ConfigError, OSError, ValueError, yaml.YAMLError, RecursionError):
        return None


def _composed(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of all keys, with unresolved interpolations."""
    if _other_plugins():
        raise Unsure
    own = folders.folder().absolute()
    names = {place: {path.name for path in place.iterdir()} for place in [*folders.user_folders(), own]}
    if any("hydra" in found or f"{SCHEMA}.yaml" in found for place, found in names.items() if place != own):
        raise Unsure
    primary, package = _file(list(names), NAME)
    groups = _defaults(primary)
    hydra = primary.pop("hydra", {})
    if package or not isinstance(hydra, dict) or not hydra.keys() <= {"output_subdir", "run"}:
        raise Unsure
    default, _ = default_cluster.choose()
    default_cluster.Choice.used = False
    chosen, given = _overrides(words, groups, set[str]().union(*names.values()))
    values = _made_of_defaults(Config)
    for group, usual in groups.items():
        if group == "_self_":
            _merge(Config, values, primary)
            continue
        choice = chosen.get(group, usual)
        if choice == DEFAULT_CLUSTER:
            choice = default_cluster.Choice.use(default)
        if not CHOICE.fullmatch(choice) or choice.lower() in WORDS.keys() | NUMBERS:
            raise Unsure
        found, package = _file([place / group for place, inside in names.items() if group in inside], choice)
        if "defaults" in found:
            raise Unsure
        _merge(Config, values, found if package else {group: found})
    for key, value in given:
        _assign(values, key, value)
    return values


@cache
def _other_plugins() -> bool:
    spec = importlib.util.find_spec("hydra_plugins")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = {path.stem for place in places if Path(place).is_dir() for path in Path(place).iterdir()}
    return any(not name.startswith("_") and name not in PLUGINS for name in found)


def _defaults(primary: dict[str, Any]) -> dict[str, str]:
    """Take the defaults list out of the primary config. Return each group and its choice, in order, and _self_."""
    first, *others = entries if isinstance(entries := primary.pop("defaults", None), list) and entries else [None]
    groups: dict[str, str] = {}
    for entry in others:
        item = {entry: ""} if entry == "_self_" else entry
        if not isinstance(item, dict) or len(item) != 1:
            raise Unsure
        [(group, choice)] = item.items()
        if isinstance(group, str) and group.startswith("override hydra/"):
            continue
        if not isinstance(group, str) or not isinstance(choice, str) or not CHOICE.fullmatch(group) or group in groups:
            raise Unsure
        groups[group] = choice
    if first != SCHEMA or "_self_" not in groups:
        raise Unsure
    return groups


def _overrides(
    words: Sequence[str], groups: Mapping[str, str], folders_and_files: set[str]
) -> tuple[dict[str, str], list[tuple[str, Any]]]:
    """Return the chosen group files, and the other overrides with their values."""
    chosen: dict[str, str] = {}
    given: list[tuple[str, Any]] = []
    for word in words:
        if not (found := OVERRIDE.fullmatch(word)):
            raise Unsure
        key, text = found[1], found[2]
        if key in groups and key != "_self_":
            if key in chosen:
                raise Unsure
            chosen[key] = text
        elif key in folders_and_files:  # a group that the primary config does not choose from
            raise Unsure
        else:
            given.append((key, _value(text)))
    return chosen, given


def _value(text: str) -> Any:
    """Return the value of an override: a number, true, false, null or plain text."""
    if text == "":
        return text
    if quoted := QUOTED.fullmatch(text):
        return quoted[1]
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if INTEGER.fullmatch(text):
        return int(text)
    if NUMBER.fullmatch(text):
        return float(text)
    if TEXT.fullmatch(text) and text.lower() not in NUMBERS:
        return text
    raise Unsure


def _file(places: Sequence[Path], name: str) -> tuple[dict[str, Any], bool]:
    """Return the YAML of the first folder with this file, and whether its package is _global_."""
    for place in places:
        try:
            text = Path(place, f"{name}.yaml").read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        package = False
        for line in filter(None, map(str.strip, text.splitlines())):
            if not re.match(r"#\s*@", line):
                break
            if line.lstrip("#").split() != ["@package", "_global_"]:
                raise Unsure
            package = True
        content = yaml.load(text, _loader())
        if not isinstance(content, dict):
            raise Unsure
        return content, package
    raise Unsure


@cache
def _loader() -> Any:
    """Return a loader of YAML with the rules of OmegaConf: 1e-3 is a number, dates are text, no key is repeated."""

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key.value, str)]
            if len(set(names)) != len(names):
                raise Unsure
            return super().construct_mapping(node, deep)

    number = r"""^(?:
         [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
        |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
        |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$"""
    Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(number, re.X), list("-+0123456789."))
    return Loader


@cache
def _keys(table: Any) -> list[tuple[Field[Any], Any]]:
    """Return each key of a table with its type."""
    hints = get_type_hints(table)
    return [(item, hints[item.name]) for item in fields(table)]


def _is_table(kind: Any) -> bool:
    return is_dataclass(kind)


def _type_of(table: Any, name: str) -> Any:
    """Return the type of a key of `table`."""
    for item, hint in _keys(table) if _is_table(table) else ():
        if item.name == name:
            return hint
    raise Unsure


def _made_of_defaults(table: Any) -> dict[str, Any]:
    """Return the default of each key."""
    made: dict[str, Any] = {}
    for item, hint in _keys(table):
        if _is_table(hint):
            made[item.name] = _made_of_defaults(hint)
        elif item.default_factory is not NO_DEFAULT:
            made[item.name] = item.default_factory()
        else:
            made[item.name] = item.default
        if type(made[item.name]) is int and float in (hint, *get_args(hint)):
            made[item.name] = float(made[item.name])
    return made


def _merge(table: Any, values: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Set the keys of `new` in `values`, those of a table."""
    hints = {item.name: hint for item, hint in _keys(table)}
    for name, value in new.items():
        if name not in hints:
            raise Unsure
        hint = hints[name]
        if _is_table(hint) or get_origin(hint) is dict:
            if not isinstance(value, dict):
                raise Unsure
            if _is_table(hint):
                _merge(hint, values[name], value)
            else:
                values[name] = _merged(hint, values[name], value)
        else:
            values[name] = _checked(hint, value)


def _merged(hint: Any, old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the type `hint` with the items of both."""
    of_key, of_value = get_args(hint)
    made = dict(old)
    for key, value in new.items():
        if type(key) is not of_key:
            raise Unsure
        if _is_table(of_value):
            if not isinstance(value, dict):
                raise Unsure
            made[key] = made[key] if key in made else _made_of_defaults(of_value)
            _merge(of_value, made[key], value)
        elif of_value is Any and isinstance(made.get(key), dict) and isinstance(value, dict):
            made[key] = _merged(dict[str, Any], made[key], value)
        else:
            made[key] = _checked(of_value, value, inside=True)
    return made


def _assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the key of an override, 'comm.backend', which is neither a table nor a dict."""
    table: Any = Config
    *tables, name = key.split(".")
    for each in tables:
        table = _type_of(table, each)
        if not _is_table(table):
            raise Unsure
        values = values[each]
    if isinstance(values.get(name), (dict, list)):
        raise Unsure
    _merge(table, values, {name: value})


def _checked(hint: Any, value: Any, inside: bool = False) -> Any:
    """Return `value` as OmegaConf converts it to the type `hint`. inside: in a list or a dict."""
    kinds = get_args(hint)
    if get_origin(hint) is Union:
        [hint] = [kind for kind in kinds if kind is not type(None)]
        return None if value is None else _checked(hint, value, inside)
    if isinstance(value, str) and "${" in value:
        reference = REFERENCE.fullmatch(value) is not None and not inside
        variable = VARIABLE.search(value) is not None and hint in (str, Any)
        if "\\" in value or get_origin(hint) is list or not (reference or variable):
            raise Unsure
    elif get_origin(hint) is list and isinstance(value, list):
        value = [_checked(kinds[0], each, inside=True) for each in value]
    elif hint is Any:
        value = _plain(value)
    elif type(value) is int and hint in (float, str):
        value = hint(value)
    elif type(value) is not hint or value == MISSING:
        raise Unsure
    return value


def _plain(value: Any) -> Any:
    """Return a value of any type."""
    if isinstance(value, list):
        return [_checked(Any, each, inside=True) for each in value]
    if isinstance(value, dict):
        return _merged(dict[str, Any], {}, value)
    if type(value) not in (str, int, float, bool, type(None)) or value == MISSING:
        raise Unsure
    return value


def _resolved(hint: Any, value: Any, values: Mapping[str, Any], chain: int = 0) -> Any:
    """Return `value` with the values of interpolations."""
    if _is_table(hint):
        return {item.name: _resolved(kind, value[item.name], values) for item, kind in _keys(hint)}
    if isinstance(value, dict):
        kind = get_args(hint)[1] if get_origin(hint) is dict else Any
        return {key: _resolved(kind, each, values) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolved(str, each, values) for each in value]
    if value == MISSING or chain > LONGEST_CHAIN:
        raise Unsure
    if not isinstance(value, str) or "${" not in value:
        return value
    if found := REFERENCE.fullmatch(value):
        table: Any = Config
        target: Any = values
        for name in found[1].split("."):
            table = _type_of(table, name)
            target = target[name]
        if isinstance(target, (dict, list)):
            raise Unsure
        return _checked(hint, _resolved(table, target, values, chain + 1))
    text = VARIABLE.sub(_variable, value)
    if "${" in text:
        raise Unsure
    return text


def _variable(found: re.Match[str]) -> str:
    value = os.environ.get(found[1])
    if value is None or "$" in value or "\\" in value:
        raise Unsure
    return value


def _made(table: Any, document: Mapping[str, Any]) -> Any:
    """Return the dataclass of a table with these values."""
    values = {item.name: _object(hint, document[item.name]) for item, hint in _keys(table)}
    made = table(**{item.name: values[item.name] for item, _ in _keys(table) if item.init})
    for item, _ in _keys(table):
        if not item.init:
            setattr(made, item.name, values[item.name])
    return made


def _object(hint: Any, value: Any) -> Any:
    if _is_table(hint):
        return _made(hint, value)
    if get_origin(hint) is dict:
        return {key: _object(get_args(hint)[1], each) for key, each in value.items()}
    return _copied(value)


def _copied(value: Any) -> Any:
    """Return a copy, because the config and its document change separately."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
