"""Checks the command line for arguments that are not key=value, for repeated keys and for keys without effect."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from hpcinit.base.errors import ConfigError
from hpcinit.config import keys, spellings
from hpcinit.config.slurm_options import ELSEWHERE, OWNED, REASONS, SAME_VALUE

SHORT = {**spellings.SHORT, "p": "partition", "q": "qos", "n": "ntasks", "D": "chdir", "o": "output", "e": "error",
         "a": "array"}  # fmt: skip
FREE = ("deepspeed.ds_config.", "deepspeed.optimizer_params.")  # tables that are passed to DeepSpeed unchecked
SLURM_TEXT = "dependency"  # the key whose value is Slurm's own text, with commas, colons and ids such as 4242_7


def parse(parser: ArgumentParser, line: Sequence[str]) -> Namespace:
    """Return Hydra's flags and the overrides. Raise ConfigError where argparse would print its usage and exit."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse  # type: ignore[method-assign]
    args, unknown = parser.parse_known_intermixed_args(list(line))
    args.overrides = with_quoted_lists(args.overrides)
    if found := mistakes(line, unknown, args.overrides):
        raise ConfigError(*found)
    if (args.package or args.resolve) and not (args.cfg or args.help):
        flag = f"-p {args.package}" if args.package else "--resolve"
        name = args.package or "NAME"
        raise ConfigError(f"{flag}: expected together with --cfg; to choose a partition: partition={name}")
    if args.config_path:
        raise ConfigError(
            f"--config-path {args.config_path}: hpcinit's own configs cannot be replaced; use --config-dir"
        )
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: expected a folder that exists")
    return args


def mistakes(arguments: Sequence[str], unknown: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return a message for each flag that does not exist and each pair of arguments such as `nodes 4`.

    arguments: the whole command line. unknown, overrides: the unknown flags in it, and the arguments without dashes.
    """
    found: list[str] = []
    at = 0
    while at < len(arguments):
        argument, value = arguments[at], arguments[at + 1] if at + 1 < len(arguments) else ""
        value = value if value in {*overrides, *unknown} and _is_bare(value) else ""
        if spaced := _with_spaces(arguments[at : at + 3], overrides):
            found.append(f"{' '.join(spaced)}: expected no spaces around =, as in {''.join(spaced)}")
            at += len(spaced)
            continue
        if argument in unknown and argument.startswith("-"):
            found.append(_flag(argument, value))
        elif value and argument in overrides and _is_bare(argument) and (key := keys.nearest(argument)):
            found.append(f"{argument} {value}: expected key=value, as in {key}={value}")
        else:
            value = ""
        at += 2 if value else 1
    return found


def _with_spaces(arguments: Sequence[str], overrides: Sequence[str]) -> Sequence[str]:
    """Return the first two or three arguments if they are `nodes = 2`, `nodes= 2` or `nodes =2`; else none."""
    for known in (arguments[:3], arguments[:2]):
        text = "".join(known)
        key, _, value = text.partition("=")
        apart = text.count("=") == 1 and known[0] != text and (known[0].endswith("=") or known[1].startswith("="))
        if apart and value and keys.kind(key) is not None and set(known) <= set(overrides):
            return known
    return ()


def sbatchs_quality(arguments: Sequence[str]) -> list[str]:
    """Return a message for `-q NAME`: sbatch's -q is the QOS, but hpcinit's is quiet and takes no value."""
    return [
        message
        for flag, name in pairwise(arguments)
        if flag == "-q" and _is_bare(name)
        for message in mistakes([flag, name], [flag], [name])
    ]


def removals(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a message for each ~key of hpcinit: ~nodes would silently mean the default, and ~cluster no cluster."""
    for override in overrides:
        key, _, _ = override.removeprefix("~").partition("=")
        if override.startswith("~") and keys.kind(key) is not None and not keys.is_table(key.rpartition(".")[0] or key):
            choice = "null" if keys.expected(key).endswith("or null") else "..."
            yield f"{override}: hpcinit's own keys cannot be removed; set another value: {key}={choice}"


def repeated(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each key that is given twice. The last one counts, which wrapper scripts rely on."""
    given = Counter(_key(override) for override in overrides if "=" in override)
    for key, times in given.items():
        if times > 1 and key:
            last = [override for override in overrides if _key(override) == key][-1]
            yield f"{key} is given {times} times; the last one counts: {last}"


def unused(added: Sequence[str], document: Any, chosen: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (key, warning) for each +key that neither hpcinit nor any other key reads.

    added: overrides with a plus. document: the config with unresolved interpolations. chosen: group -> choice, such as
    +experiment=x.
    """
    written = [raw for _, raw in references(document)]
    for override in added:
        key = override.lstrip("+").partition("=")[0]
        if key in chosen or keys.kind(key) is not None or key.startswith(("hydra", *FREE)):
            continue
        if not any(key in raw for raw in written):
            near = keys.guess(key.rpartition(".")[2], keys.beside(key))
            yield key, f"{override}: nothing reads {key}, neither hpcinit nor another key with ${{{key}}}{near}"


def references(document: Any) -> Iterator[tuple[str, str]]:
    """Return every (key, text) whose text contains an interpolation."""
    return ((key, text) for key, text in texts(document) if "${" in text)


def texts(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every (key, text) of a config as plain containers."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(document, list):
        for at, value in enumerate(document):
            yield from texts(value, f"{key}[{at}]")
    elif isinstance(document, str):
        yield key, document


def with_quoted_lists(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the value of dependency quoted. Hydra would sweep over its commas, and read 4242_7 as
    the number 42427.

    The pairs in comm.backend=cpu:gloo,cuda:nccl are quoted as well, because Hydra would sweep over them.
    """
    overrides = [re.sub(r"(?<=^comm\.backend=)\w+:\w+,\w+:\w+$", r"'\g<0>'", override) for override in overrides]
    return [
        f"{key}={_quoted(value)}" if _key(override) == SLURM_TEXT and value else override
        for override in overrides
        for key, _, value in [override.partition("=")]
    ]


def _quoted(value: str) -> str:
    return value if value == "null" or value[0] in "'\"" else "'" + value.replace("'", "\\'") + "'"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def not_overrides(given: Sequence[str]) -> list[str]:
    """Return the arguments that are neither KEY=VALUE nor ~KEY."""
    return [argument for argument in given if "=" not in argument and not argument.startswith("~")]


def _is_bare(argument: str) -> bool:
    return "=" not in argument and not argument.startswith(("-", "~"))


def _flag(flag: str, value: str) -> str:
    """Return the message for a flag such as `--wait`, `--nodes 4`, `--nodes=4`, `-N4` or `--constraint=x`."""
    name, _, inline = flag.lstrip("-").partition("=")
    if not flag.startswith("--") and name[:1] in SHORT:
        name, inline = SHORT[name[:1]], name[1:] or inline
    wrong, value = f"{flag} {value}".rstrip() + ": no such option, expected key=value", inline or value
    key = name.replace("-", "_")
    if keys.kind(key) is not None:
        return f"{wrong}: {key}={value or ('true' if keys.kind(key) is bool else '...')}"
    if (own := OWNED.get(name)) and name != "gres":
        return f"{wrong}: {own}={value if value and name in SAME_VALUE else '...'}"
    if why := REASONS.get(name) or ELSEWHERE.get(name):
        return f"{wrong}; {why}"
    if (near := keys.nearest(key)) and not keys.is_group(near):
        return f"{wrong}; did you mean {near}={value or '...'}"
    if value and re.fullmatch(r"[a-z][a-z-]+", name):
        return f"{wrong}; if it is sbatch's: +cluster.sbatch.{name}={value}; {_after_dashes(flag, value)}"
    return f"{wrong}, as in nodes=4 ({keys.ALL}); {_after_dashes(flag, value)}"


def _after_dashes(flag: str, value: str) -> str:
    return f"if it is your program's: -- train.py {flag}{f' {value}' * (bool(value) and '=' not in flag)}"
