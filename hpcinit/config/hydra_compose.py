"""Composes a Config from overrides with Hydra: for one request, for sweeps, for --cfg, --help and completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpcinit.base.errors import ConfigError
from hpcinit.config import folders, hydra_errors, hydra_setup, spellings
from hpcinit.config import overrides as command_line
from hpcinit.config.hydra_setup import VERSION_BASE, register_resolver
from hpcinit.config.request import NAME, Composer, Prepare, Request, Search, Task
from hpcinit.config.schema import Config
from hpcinit.config.typed_text import Texts, put

UNUSABLE = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    ValueError,
    AttributeError,
    RecursionError,
)  # Hydra and OmegaConf raise these for an invalid request
SHOW = ("cfg", "help", "hydra_help", "info", "shell_completion", "experimental_rerun")  # flags that print and exit


@hydra_setup.state_kept()
def main(
    line: Sequence[str],
    prepare: Prepare,
    task: Task,
    search: Callable[[], Search] | None = None,
    cluster_required: bool = False,
) -> int:
    """Do what compose.main() does, with the same arguments."""
    line = spellings.translate(line, flags())
    args = command_line.parse(get_args_parser(), line)
    shows = any(getattr(args, flag) for flag in SHOW)
    hydra_setup.register(args.config_dir, cluster_required and not shows)
    name = args.config_name or NAME
    multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    if shows or (any("hydra." in o for o in args.overrides) and not multirun):
        # Hydra's own parser fails if overrides are before and after a flag, as in `nodes=1,2 -m name=x`.
        return _run_hydra([w for w in line if w not in args.overrides], args.overrides, name, prepare, task)
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
        raise ConfigError("hydra/sweeper: a search cannot be resubmitted; only single runs and plain sweeps can")
    from hpcinit.config import search_space as searching  # noqa: PLC0415 - for searches only

    return searching.run(args.overrides, _composer(name), prepare, search())


def _composer(name: str) -> Composer:
    return Composer(name, lambda overrides: _compose(overrides, name), _request, UNUSABLE)


def flags() -> list[str]:
    """Return the names of Hydra's own flags: --multirun, -m, --cfg and so on."""
    return [word for action in get_args_parser()._actions for word in action.option_strings]


@hydra_setup.state_kept()
def compose(overrides: Sequence[str]) -> Config:
    """Return the Config for these overrides. Raise ConfigError with all problems together."""
    hydra_setup.register()
    overrides = spellings.translate(overrides, ())
    return _request(_compose(overrides, NAME), overrides).config


def _compose(overrides: Sequence[str], name: str) -> DictConfig:
    if found := list(command_line.removals(overrides)):
        raise ConfigError(*found)
    try:
        return _compose_once(overrides, name)
    except UNUSABLE as error:
        problems = list(_every_problem(overrides, name))
        raise ConfigError(*(problems or [hydra_errors.sentence(error)])) from None


def _compose_once(overrides: Sequence[str], name: str) -> DictConfig:
    with hydra_setup.initialized(NAME):
        config = hydra.compose(name, list(overrides), return_hydra_config=True)
    if OmegaConf.get_type(config) is not Config:
        raise ConfigError(hydra_errors.not_ours(name))
    HydraConfig.instance().set_config(config)  # for ${hydra:...} interpolations
    return config


def _every_problem(overrides: Sequence[str], name: str) -> Iterator[str]:
    """Yield every problem of the overrides.

    Hydra stops at the first problem, so hpcinit adds the overrides one by one, and reports each one that fails.
    """
    # cluster=... first, because it decides whether a key such as cluster.x exists, and it replaces a wrong default.
    ordered = sorted(overrides, key=lambda text: (not _is_cluster(text), "." in text.partition("=")[0]))
    local = [f"cluster={folders.LOCAL_CLUSTER}"]
    usual = local if ordered[:1] and _is_cluster(ordered[0]) else []
    try:
        _compose_once(usual, name)
    except UNUSABLE as error:
        yield hydra_errors.sentence(error)
        try:
            _compose_once(usual := local, name)
        except UNUSABLE:
            return
    good: list[str] = []
    for override in ordered:
        first = [] if any(map(_is_cluster, (*good, override))) else usual
        try:
            _compose_once([*first, *good, override], name)
            good.append(override)
        except UNUSABLE as error:
            yield hydra_errors.sentence(error, override)


def _is_cluster(override: str) -> bool:
    return override.startswith("cluster=")


def _request(config: DictConfig, overrides: Sequence[str], combination: str = "") -> Request:
    choices = {str(k): str(v) for k, v in config.hydra.runtime.choices.items()}
    own = config.hydra
    with open_dict(config):
        del config["hydra"]
    added = [override for override in overrides if override.startswith("+")]
    unread = dict(command_line.unused(added, OmegaConf.to_container(config), choices)) if added else {}
    try:
        texts = Texts(config, own)
        value = OmegaConf.to_object(config)
        typed, texts_at = texts.typed(), texts.texts_at()
    except OmegaConfBaseException as error:
        raise ConfigError(*_unresolved(config, error, choices)) from None
    document = {str(k): v for k, v in OmegaConf.to_container(config, resolve=True).items()}  # type: ignore[union-attr]
    for place, text in texts_at.items():
        value, document = put(value, place, text), put(document, place, text)
    warnings = [*command_line.repeated(overrides)]
    return Request(value, document, combination, warnings, typed=typed, unread=unread)  # type: ignore[arg-type]


def _unresolved(config: DictConfig, error: Exception, choices: dict[str, str]) -> list[str]:
    """Return messages for mandatory keys without a value.

    If there are none, return messages for interpolations that can't be resolved.
    """
    document = OmegaConf.to_container(config)
    if missing := [key for key, raw in command_line.texts(document) if raw == MISSING]:
        # The key `name` is ${job.name}, so it has no value only if job.name has none.
        return hydra_errors.unset([key for key in missing if "." in key] or missing, choices)
    found: dict[str, str] = {}  # one per message of Hydra, because further keys may refer to the first wrong key
    for key, raw in command_line.references(document):
        try:
            OmegaConf.select(config, key)
        except OmegaConfBaseException as wrong:
            found.setdefault(str(wrong).partition("\n")[0], hydra_errors.reference(key, raw, wrong))
    return list(found.values()) or [hydra_errors.sentence(error)]


def _run_hydra(flags: list[str], overrides: list[str], name: str, prepare: Prepare, task: Task) -> int:
    """Call Hydra's own main function, for --cfg, --help, completion, and keys such as hydra.run and hydra.job."""
    from hpcinit.config import keys  # noqa: PLC0415 - for --help only

    statuses: list[int | Exception] = [0]

    def job(config: DictConfig) -> None:
        try:
            with open_dict(config):
                config["hydra"] = HydraConfig.get()
            request = _request(config, overrides)
            prepare(request)
            statuses.append(task([request]))
        except Exception as error:  # raised later, because Hydra would print its own line about it
            statuses.append(error)

    job.__module__ = "hpcinit.submit"  # the name that Hydra shows for the program
    # Hydra uses the help's text as a string.Template, in which $$ is a dollar sign.
    register_resolver("hpcinit_keys", lambda: keys.help_text(every=False).replace("$", "$$"))
    try:
        with hydra_setup.used(), _hydra_command_line([*flags, *overrides]):
            hydra.main(config_path=str(folders.folder()), config_name=NAME, **VERSION_BASE)(job)()
    except UNUSABLE as error:
        raise ConfigError(*(list(_every_problem(overrides, name)) or [hydra_errors.sentence(error)])) from None
    if isinstance(statuses[-1], Exception):
        raise statuses[-1]
    return statuses[-1]


@contextmanager
def _hydra_command_line(line: list[str]) -> Iterator[None]:
    """Set sys.argv for Hydra, and HYDRA_FULL_ERROR=1, which makes Hydra raise errors instead of exiting."""
    argv, flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *line], "1"
    try:
        yield
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, flag or ""
        if flag is None:
            del os.environ["HYDRA_FULL_ERROR"]
