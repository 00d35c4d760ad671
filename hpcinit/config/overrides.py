"""Checks the command line for arguments that are not key=value, keys that are given twice, and keys without effect."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from hpcinit.base.errors import ConfigError
from hpcinit.config import keys

FREE = ("deepspeed.ds_config.", "deepspeed.optimizer_params.")  # tables that are passed to DeepSpeed unchecked
SLURM_TEXT = "dependency"  # the key whose value is Slurm's own text, with commas, colons and ids such as 4242_7


def parse(parser: ArgumentParser, line: Sequence[str]) -> Namespace:
    """Return Hydra's flags and the overrides from the command line.

    Raise ConfigError for a wrong argument. argparse itself would print its usage and exit.
    """

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse  # type: ignore[method-assign]
    args, unknown = parser.parse_known_intermixed_args(list(line))
    args.overrides = with_quoted_lists(args.overrides)
    if found := list(mistakes(line, unknown, args.overrides)):
        raise ConfigError(*found)
    if (args.package or args.resolve) and not (args.cfg or args.help):
        if args.package:
            meant = f"; to choose a partition: partition={args.package}"
            raise ConfigError(f"-p {args.package} works only together with --cfg{meant}")
        raise ConfigError("--resolve works only together with --cfg")
    if args.config_path:
        raise ConfigError(
            f"--config-path {args.config_path}: hpcinit's own configs cannot be replaced; use --config-dir"
        )
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: expected a folder that exists")
    return args


def mistakes(arguments: Sequence[str], unknown: Sequence[str], overrides: Sequence[str]) -> Iterator[str]:
    """Yield a message for each unknown flag, and one message for all arguments that are not key=value.

    arguments: the whole command line.
    unknown: the flags that the parser does not know, each followed by its value.
    overrides: the arguments without dashes.
    """
    # argparse counts what follows an unknown flag as unknown.
    bare = not_overrides([*overrides, *(word for word in unknown if not word.startswith("-"))])
    for flag, following in pairwise([*arguments, ""]):
        if flag in unknown and flag.startswith("-"):
            value = following if following in bare else ""
            bare = [word for word in bare if word != value]
            yield _flag(flag, value)
    if bare:
        key = next(filter(None, map(keys.nearest, bare)), "nodes")
        example = f"{key}={'true' if keys.kind(key) is bool else '...'}"
        yield (
            f"{' '.join(bare)}: expected key=value without spaces, as in {example}; the program goes after --: "
            "hpcinit submit -- train.py"
        )


def sbatchs_quality(arguments: Sequence[str]) -> list[str]:
    """Return a message for `-q NAME`, which chooses the QOS in sbatch.

    hpcinit's own -q means quiet and takes no value.
    """
    after = [name for flag, name in pairwise(arguments) if flag == "-q" and not_overrides([name])]
    return [f"-q {name}: did you mean qos={name}? -q prints only the job id" for name in after if name[0] != "-"]


def removals(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a message for each ~KEY that would remove one of the keys in hpcinit's schema.

    Without this check, ~nodes would silently restore the default, and ~cluster would remove the whole cluster.
    """
    for override in overrides:
        key, _, _ = override.removeprefix("~").partition("=")
        if override.startswith("~") and keys.kind(key) is not None and not keys.is_table(key.rpartition(".")[0] or key):
            choice = "null" if keys.expected(key).endswith("or null") else "..."
            yield f"{override}: hpcinit's own keys cannot be removed; set another value: {key}={choice}"


def repeated(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each key that is given more than once.

    The last value is used, because wrapper scripts rely on that.
    """
    given = Counter(_key(override) for override in overrides if "=" in override)
    for key, times in given.items():
        if times > 1 and key:
            last = [override for override in overrides if _key(override) == key][-1]
            yield f"{key} is given {times} times; the last one counts: {last}"


def unused(added: Sequence[str], document: Any, chosen: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each added key that has no effect, and a warning about it.

    A key has no effect if hpcinit does not know it and no other key refers to it.

    added: the overrides that start with a plus.
    document: the config, with interpolations not yet resolved.
    chosen: the choice for each group, such as 'x' for +experiment=x.
    """
    written = [raw for _, raw in references(document)]
    for override in added:
        key = override.lstrip("+").partition("=")[0]
        if key in chosen or keys.kind(key) is not None or key.startswith(("hydra", *FREE)):
            continue
        if not any(key in raw for raw in written):
            near = keys.guess(key.rpartition(".")[2], keys.beside(key))
            yield (
                key,
                f"{override} has no effect: hpcinit has no key {key}, and no other key refers to ${{{key}}}{near}",
            )


def references(document: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each key whose text contains an interpolation."""
    return ((key, text) for key, text in texts(document) if "${" in text)


def texts(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each key of a config whose value is a string.

    document: the config as plain containers.
    """
    if isinstance(document, dict):
        for name, value in document.items():
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(document, list):
        for at, value in enumerate(document):
            yield from texts(value, f"{key}[{at}]")
    elif isinstance(document, str):
        yield key, document


def with_quoted_lists(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with quotes around values that must stay text: `dependency`, and lists in comm.backend.

    Without quotes, Hydra would treat a value with commas as a sweep, and read dependency=4242_7 as the number 42427.
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


def _flag(flag: str, value: str) -> str:
    """Return the message for an unknown flag such as `--lr 3`. Known flags were already translated by spellings.py."""
    name, _, inline = flag.lstrip("-").partition("=")
    wrong = f"{flag} {value}".rstrip() + ": no such option, expected key=value"
    if (near := keys.nearest(name.replace("-", "_"))) and not keys.is_group(near):
        return f"{wrong}; did you mean {near}={value or inline or '...'}?"
    given = f" {value}" if value and not inline else ""
    return (
        f"{wrong}; for an option of sbatch: +cluster.sbatch.{name}={value or inline or '...'}; for your program's "
        f"option: -- train.py {flag}{given}"
    )
