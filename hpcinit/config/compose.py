"""From overrides to a Config, through Hydra. The only file that knows Hydra and OmegaConf.

Where YAML is looked for, first match wins: ./conf, $HPCINIT_CONF, ~/.config/hpcinit, the package's own.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpcinit.config.schema import Config
from hpcinit.facts.errors import ConfigError

NAME = "hpcinit"  # of the primary config: conf/hpcinit.yaml
UNUSABLE = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # what a wrong request raises
Task = Callable[[Config, dict[str, Any]], int]  # (config, the same as plain containers) -> exit status


def main(overrides: Sequence[str], task: Task) -> int:
    """Compose and run `task` on it, once, or once per combination with --multirun.

    overrides: Hydra's command line, flags such as --cfg, --help and --multirun included.
    Returns the exit status: the task's own, the highest of several. Raises ConfigError.
    """
    _register()
    args = get_args_parser().parse_intermixed_args(list(overrides))
    flags = {k: v for k, v in vars(args).items() if v and k not in {"overrides", "run"}}
    if not flags and not any("hydra." in override for override in args.overrides):
        composed = _compose(args.overrides)
        if composed.hydra.mode in (None, RunMode.RUN):
            return task(*_typed(composed))
    # Hydra's own parser wants the flags together: `nodes=1,2 -m name=x` fails there.
    options = [word for word in overrides if word not in args.overrides]
    return _through_hydra_main([*options, *args.overrides], task)


def compose(overrides: Sequence[str]) -> Config:
    """The Config for these overrides. Raises ConfigError with every problem at once."""
    _register()
    return _typed(_compose(overrides))[0]


def _compose(overrides: Sequence[str]) -> DictConfig:
    try:
        return _compose_once(overrides)
    except UNUSABLE as error:
        problems = list(_every_problem(overrides))
        raise ConfigError(*(problems or [_explain(error, "")])) from None


def _compose_once(overrides: Sequence[str]) -> DictConfig:
    with hydra.initialize_config_dir(config_dir=str(folder()), version_base="1.3", job_name=NAME):
        config = hydra.compose(NAME, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # for ${hydra:...} interpolations
    return config


def _every_problem(overrides: Sequence[str]) -> Iterator[str]:
    """Hydra stops at the first problem; add the overrides one by one and report each that breaks."""
    good: list[str] = []
    # Choices first: whether cluster.x exists depends on the cluster.
    for override in sorted(overrides, key=lambda text: "." in text.partition("=")[0]):
        try:
            _compose_once([*good, override])
            good.append(override)
        except UNUSABLE as error:
            yield _explain(error, override)


def _typed(config: DictConfig) -> tuple[Config, dict[str, Any]]:
    with open_dict(config):
        del config["hydra"]
    try:
        OmegaConf.resolve(config)
        value = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, "")) from None
    document = OmegaConf.to_container(config)
    assert isinstance(value, Config) and isinstance(document, dict)
    return value, {str(k): v for k, v in document.items()}


def _through_hydra_main(argv: list[str], task: Task) -> int:
    """Everything else that Hydra can do, by its own hand: --cfg, --help, --multirun, completion."""
    statuses = [0]

    def job(config: DictConfig) -> None:
        statuses.append(task(*_typed_copy(config)))

    job.__module__ = "hpcinit.submit"  # the name that Hydra shows for the program
    saved_argv, saved_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *argv]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra prints a traceback and exits by itself otherwise
    try:
        hydra.main(config_path=str(folder()), config_name=NAME, version_base="1.3")(job)()
    except UNUSABLE as error:
        raise ConfigError(_explain(error, "")) from None
    finally:
        sys.argv = saved_argv
        if saved_flag is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = saved_flag
    return max(statuses)


def _typed_copy(config: DictConfig) -> tuple[Config, dict[str, Any]]:
    composed = config.copy()
    with open_dict(composed):
        composed["hydra"] = None
    return _typed(composed)


def _explain(error: Exception, override: str) -> str:
    """One sentence: the key, the value, what was expected, the choices."""
    options: list[str] | None = getattr(error, "options", None)
    if options is not None:
        group, _, choice = str(getattr(error, "missing_cfg_file", "")).rpartition("/")
        return f"{group}={choice}: no such {group}, expected one of: {', '.join(options)}{_guess(choice, options)}"
    if isinstance(error, OverrideParseException) or "LexerNoViableAlt" in str(error):
        return (
            f"{override or error}: not a key=value that Hydra can read; quote what is special in it once for Hydra "
            "and once for the shell, as in 'comment=\"it is, well: special\"'"
        )
    if isinstance(error, yaml.YAMLError):
        return f"{override}: {' '.join(str(error).split())}"
    file, detail, full_key = _details(error)
    where = f"{override}: " if override else ""
    where += f"in {file}.yaml: " if file else ""
    if full_key and ("not in '" in detail or "not in struct" in detail):
        known = _keys_beside(full_key)
        if not known:  # a table of the user's own, such as cluster.env
            return f"{where}no such key {full_key!r} yet, add it with a plus sign: +{override or full_key}"
        guess = _guess(full_key.split(".")[-1], known)
        return f"{where}no such key {full_key!r}, expected one of: {', '.join(known)}{guess}"
    return f"{where}{full_key}: {detail}" if full_key and full_key not in override else f"{where}{detail}"


def _details(error: Exception) -> tuple[str, str, str]:
    """The config file that an error of Hydra or OmegaConf is about, what is wrong in it, and the key; or ''.

    Hydra wraps OmegaConf's error, as its cause for an override and as text for a file:
    "In 'cluster/x': ConfigKeyError raised while composing config:\\nKey 'y' not in 'Cluster'\\n  full_key: cluster.y"
    """
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    text = str(cause)
    in_file = re.match(r"In '([^']+)': \w+ raised while composing config:\n", text)
    rest = text[in_file.end() :] if in_file else text
    full_key = re.search(r"full_key: (\S+)", text)
    return in_file[1] if in_file else "", rest.partition("\n")[0], full_key[1] if full_key else ""


def _keys_beside(full_key: str) -> list[str]:
    """The keys that exist where `full_key` was looked for."""
    with hydra.initialize_config_dir(config_dir=str(folder()), version_base="1.3", job_name=NAME):
        config: Any = hydra.compose(NAME)
    parent = full_key.rpartition(".")[0]
    node = OmegaConf.select(config, parent) if parent else config
    return sorted(str(k) for k in node) if isinstance(node, DictConfig) else []


def _guess(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def folder() -> Path:
    """The package's own conf/: inside the wheel, or beside the package in a checkout."""
    inside = Path(__file__).parent.parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent.parent / "conf"


def user_folders() -> list[Path]:
    """Where a user's own YAML lies, first match first; only folders that exist."""
    named = os.environ.get("HPCINIT_CONF")
    places = [Path("conf"), Path(named) if named else None, Path("~/.config/hpcinit").expanduser()]
    found = [place.absolute() for place in places if place is not None and place.is_dir()]
    if named and not Path(named).is_dir():
        raise ConfigError(f"HPCINIT_CONF is {named!r}, expected a folder that exists")
    return found


class _UserFolders(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in reversed([p for p in user_folders() if p != folder().absolute()]):
            search_path.prepend("user", f"file://{place}")


def _register() -> None:
    Plugins.instance().register(_UserFolders)
    ConfigStore.instance().store(name="hpcinit_schema", node=Config)
