"""From overrides to Configs, through Hydra: one at a time; combinations, variations and search are for sweeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpcinit.base.errors import ConfigError, HpcinitError
from hpcinit.config import explain
from hpcinit.config import overrides as command_line
from hpcinit.config.folders import folder, user_folders
from hpcinit.config.schema import Config
from hpcinit.records.results import Value

NAME = "hpcinit"  # of the primary config: conf/hpcinit.yaml
UNUSABLE = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    AttributeError,
    RecursionError,
)  # what a wrong request raises
SHOW = ("cfg", "help", "hydra_help", "info", "shell_completion", "experimental_rerun")  # flags that print and end


@dataclass(frozen=True)
class Request:
    """A Config and where it came from.

    document: the config as plain containers. combination: in a sweep, the overrides that make it this one, else ''.
    warnings: what was not refused and is worth a look, one sentence each. number: its place in the sweep, from 0.
    """

    config: Config
    document: dict[str, Any]
    combination: str
    warnings: Sequence[str]
    number: int = 0


@dataclass(frozen=True)
class Composer:
    """How a primary config is composed with overrides, for those who do it many times.

    compose: overrides to Hydra's config. request: of such a config, its overrides and combination. unusable: the errors
    that a wrong override raises.
    """

    name: str
    compose: Callable[[Sequence[str]], Any]
    request: Callable[[Any, Sequence[str], str], Request]
    unusable: tuple[type[Exception], ...]


Prepare = Callable[[Request], None]  # changes a request or refuses it with an HpcinitError
Task = Callable[[Sequence[Request]], int]  # -> exit status


class Search(Protocol):
    """Who submits what a sweeper asks for, batch after batch, and tells it what each came to."""

    def batch(self, requests: Sequence[Request]) -> Sequence[Value | HpcinitError]:
        """Submitted and waited for: of each its result, or why there is none. Raises Ended where nobody waits."""

    def end(self, written: Path) -> int:
        """The sweeper has found what it was to find, and left files in the folder `written`. The exit status."""

    def interrupted(self) -> int:
        """Ctrl-C between two batches. The exit status."""


class Ended(Exception):
    """A search that ends early, and has said why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def main(line: Sequence[str], prepare: Prepare, task: Task, search: Callable[[], Search] | None = None) -> int:
    """Compose, `prepare` every request, and hand them all to `task`: one, or with --multirun one per combination.

    line: Hydra's command line, flags such as --cfg, --help and --multirun included. search: who is asked for the
    results where a sweeper waits for them; None where there can be none.
    Returns the task's exit status. Raises ConfigError with the problems of all requests, before any reaches `task`.
    """
    args = command_line.parse(get_args_parser(), line)
    _register(args.config_dir)
    name = args.config_name or NAME
    multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    if any(getattr(args, flag) for flag in SHOW) or (any("hydra." in o for o in args.overrides) and not multirun):
        # Hydra's own parser wants the flags together: `nodes=1,2 -m name=x` fails there.
        return _by_hydras_hand([w for w in line if w not in args.overrides], args.overrides, name, prepare, task)
    if not multirun:
        composed = _compose(args.overrides, name)
        if composed.hydra.mode in (None, RunMode.RUN):
            request = _request(composed, args.overrides)
            prepare(request)
            return task([request])
    from hpcinit.config import combinations  # noqa: PLC0415 - for sweeps only

    with suppress(combinations.Searches):
        return task(combinations.requests(args.overrides, _composer(name), prepare))
    if search is None:
        raise ConfigError("hydra/sweeper: what is submitted again is a run as it was, without a search")
    from hpcinit.config import search_space as searching  # noqa: PLC0415 - for those who search

    return searching.run(args.overrides, _composer(name), prepare, search())


def _composer(name: str) -> Composer:
    return Composer(name, lambda overrides: _compose(overrides, name), _request, UNUSABLE)


def flags() -> list[str]:
    """Hydra's own: --multirun, -m, --cfg and so on."""
    return [word for action in get_args_parser()._actions for word in action.option_strings]


def compose(overrides: Sequence[str]) -> Config:
    """The Config for these overrides. Raises ConfigError with every problem at once."""
    _register(None)
    return _request(_compose(overrides, NAME), overrides).config


def _compose(overrides: Sequence[str], name: str) -> DictConfig:
    if found := list(command_line.removals(overrides)):
        raise ConfigError(*found)
    try:
        return _compose_once(overrides, name)
    except UNUSABLE as error:
        problems = list(_every_problem(overrides, name))
        raise ConfigError(*(problems or [explain.sentence(error)])) from None


def _compose_once(overrides: Sequence[str], name: str) -> DictConfig:
    with hydra.initialize_config_dir(config_dir=str(folder()), version_base="1.3", job_name=NAME):
        config = hydra.compose(name, list(overrides), return_hydra_config=True)
    if OmegaConf.get_type(config) is not Config:
        raise ConfigError(explain.not_ours(name))
    HydraConfig.instance().set_config(config)  # for ${hydra:...} interpolations
    return config


def _every_problem(overrides: Sequence[str], name: str) -> Iterator[str]:
    """Hydra stops at the first problem; add the overrides one by one and report each that breaks."""
    try:
        _compose_once([], name)
    except UNUSABLE as error:
        yield explain.sentence(error)
        return
    good: list[str] = []
    # Choices first: whether cluster.x exists depends on the cluster.
    for override in sorted(overrides, key=lambda text: "." in text.partition("=")[0]):
        try:
            _compose_once([*good, override], name)
            good.append(override)
        except UNUSABLE as error:
            yield explain.sentence(error, override)


def _request(config: DictConfig, overrides: Sequence[str], combination: str = "") -> Request:
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items()}
    with open_dict(config):
        del config["hydra"]
    added = [override for override in overrides if override.startswith("+")]
    unused = command_line.unused(added, OmegaConf.to_container(config), choices) if added else ()
    warnings = [*command_line.repeated(overrides), *unused]
    try:
        OmegaConf.resolve(config)
        value = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(*_unresolved(config, error, choices)) from None
    document = {str(k): v for k, v in OmegaConf.to_container(config).items()}  # type: ignore[union-attr]
    return Request(value, document, combination, warnings)  # type: ignore[arg-type]


def _unresolved(config: DictConfig, error: Exception, choices: dict[str, str]) -> list[str]:
    """Mandatory values that are missing, or else the interpolations that lead nowhere."""
    document = OmegaConf.to_container(config)
    if missing := [key for key, raw in command_line.texts(document) if raw == MISSING]:
        # name is ${job.name} and missing only because that is
        return explain.unset([key for key in missing if "." in key] or missing, choices)
    found: dict[str, str] = {}  # by what Hydra says, as other keys refer to the first that is wrong
    for key, raw in command_line.references(document):
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as wrong:
            found.setdefault(str(wrong).partition("\n")[0], explain.reference(key, raw, wrong))
    return list(found.values()) or [explain.sentence(error)]


def _by_hydras_hand(flags: list[str], overrides: list[str], name: str, prepare: Prepare, task: Task) -> int:
    """What else Hydra can do: --cfg, --help, completion, and hydra.run, hydra.job and the like for one submission."""
    from hpcinit.config import keys  # noqa: PLC0415 - for --help only

    statuses: list[int | Exception] = [0]

    def job(config: DictConfig) -> None:
        try:
            with open_dict(config):
                config["hydra"] = HydraConfig.get()
            request = _request(config, overrides)
            prepare(request)
            statuses.append(task([request]))
        except Exception as error:  # kept: Hydra writes a line of its own about one that comes through
            statuses.append(error)

    job.__module__ = "hpcinit.submit"  # the name that Hydra shows for the program
    # Hydra takes the help's text for a string.Template.
    OmegaConf.register_new_resolver("hpcinit_keys", lambda: keys.text().replace("$", "$$"), replace=True)
    try:
        with _as_hydra_reads([*flags, *overrides]):
            hydra.main(config_path=str(folder()), config_name=NAME, version_base="1.3")(job)()
    except UNUSABLE as error:
        raise ConfigError(*(list(_every_problem(overrides, name)) or [explain.sentence(error)])) from None
    if isinstance(statuses[-1], Exception):
        raise statuses[-1]
    return statuses[-1]


@contextmanager
def _as_hydra_reads(line: list[str]) -> Iterator[None]:
    """Its own command line; and with HYDRA_FULL_ERROR=1 it raises, where it prints a traceback and exits otherwise."""
    argv, flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *line], "1"
    try:
        yield
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, flag or ""
        if flag is None:
            del os.environ["HYDRA_FULL_ERROR"]


class _Folders(SearchPathPlugin):
    """Where YAML is looked for, first match wins: the user's folders, the package's own, --config-dir."""

    last: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in reversed([p for p in user_folders() if p != folder().absolute()]):
            search_path.prepend("user", f"file://{place}")
        if self.last is not None:
            search_path.append("command-line", f"file://{self.last}")


def _register(config_dir: str | None) -> None:
    _Folders.last = Path(config_dir).absolute() if config_dir else None
    Plugins.instance().register(_Folders)
    ConfigStore.instance().store(name="hpcinit_schema", node=Config)
