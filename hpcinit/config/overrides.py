"""The overrides of the command line: those that are no key=value, given twice or read by nothing."""

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
from hpcinit.config.slurm_options import ELSEWHERE, OWNED, REASONS, SAME_VALUE

SHORT = {"N": "nodes", "p": "partition", "A": "account", "q": "qos", "c": "cpus-per-task", "t": "time",
         "J": "job-name", "n": "ntasks", "D": "chdir", "o": "output", "e": "error", "G": "gpus"}  # fmt: skip
FREE = ("deepspeed.ds_config.", "deepspeed.optimizer_params.")  # tables that go to DeepSpeed whole, however deep
WAITS = {"after", "after_ok"}  # whose values are jobs' ids, '4242_7' of an array among them


def parse(parser: ArgumentParser, line: Sequence[str]) -> Namespace:
    """Hydra's flags and the overrides among them. Raises ConfigError where argparse would print its usage and exit."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse  # type: ignore[method-assign]
    args, unknown = parser.parse_known_intermixed_args(list(line))
    args.overrides = with_ids_as_text(args.overrides)
    if found := mistakes(line, unknown, args.overrides):
        raise ConfigError(*found)
    if (args.package or args.resolve) and not (args.cfg or args.help):
        flag = f"-p {args.package}" if args.package else "--resolve"
        name = args.package or "NAME"
        raise ConfigError(f"{flag}: says what --cfg shows, and needs it; the partition is partition={name}")
    if args.config_path:
        raise ConfigError(f"--config-path {args.config_path}: hpcinit's own configs stay in place; use --config-dir")
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir}: expected a folder that exists")
    return args


def mistakes(words: Sequence[str], unknown: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """One message for each flag that does not exist and each pair of words such as `nodes 4`.

    words: all of the command line; unknown, overrides: those of them that are unknown flags, and no flags.
    """
    found: list[str] = []
    at = 0
    while at < len(words):
        word, value = words[at], words[at + 1] if at + 1 < len(words) else ""
        value = value if value in {*overrides, *unknown} and _is_bare(value) else ""
        if blank := _blank(words[at : at + 3], overrides):
            found.append(f"{' '.join(blank)}: expected no blank beside the =, as in {''.join(blank)}")
            at += len(blank)
            continue
        if word in unknown and word.startswith("-"):
            found.append(_flag(word, value))
        elif value and word in overrides and _is_bare(word) and (key := keys.nearest(word)):
            found.append(f"{word} {value}: expected key=value, as in {key}={value}")
        else:
            value = ""
        at += 2 if value else 1
    return found


def _blank(words: Sequence[str], overrides: Sequence[str]) -> Sequence[str]:
    """The first two or three of `words` if they are `nodes = 2`, `nodes= 2` or `nodes =2`; else none."""
    for known in (words[:3], words[:2]):
        text = "".join(known)
        key, _, value = text.partition("=")
        apart = text.count("=") == 1 and known[0] != text and (known[0].endswith("=") or known[1].startswith("="))
        if apart and value and keys.kind(key) is not None and set(known) <= set(overrides):
            return known
    return ()


def sbatchs_quality(words: Sequence[str]) -> list[str]:
    """`-q NAME` of one who means sbatch's, where ours is quiet and takes no value; told as other options of sbatch."""
    return [
        said
        for flag, name in pairwise(words)
        if flag == "-q" and _is_bare(name)
        for said in mistakes([flag, name], [flag], [name])
    ]


def removals(overrides: Sequence[str]) -> Iterator[str]:
    """~nodes would quietly mean the default, and ~cluster no cluster at all."""
    for override in overrides:
        key, _, _ = override.removeprefix("~").partition("=")
        if override.startswith("~") and keys.kind(key) is not None and not keys.is_table(key.rpartition(".")[0] or key):
            choice = "null" if keys.expected(key).endswith("or null") else "..."
            yield f"{override}: hpcinit's own keys cannot be taken away; give it another value: {key}={choice}"


def repeated(overrides: Sequence[str]) -> Iterator[str]:
    """A key that is given twice: the last one counts, as wrappers with defaults of their own rely on."""
    given = Counter(_key(override) for override in overrides if "=" in override)
    for key, times in given.items():
        if times > 1 and key:
            last = [override for override in overrides if _key(override) == key][-1]
            yield f"{key} is given {times} times; the last one counts: {last}"


def unused(added: Sequence[str], document: Any, chosen: Mapping[str, str]) -> Iterator[str]:
    """A warning for each +key that neither hpcinit nor any other key reads.

    added: overrides with a plus. document: the config with its interpolations as written. chosen: group -> choice,
    as +experiment=x is one.
    """
    written = [raw for _, raw in references(document)]
    for override in added:
        key = override.lstrip("+").partition("=")[0]
        if key in chosen or keys.kind(key) is not None or key.startswith(("hydra", *FREE)):
            continue
        if not any(key in raw for raw in written):
            near = keys.guess(key.rpartition(".")[2], keys.beside(key))
            yield f"{override}: nothing reads {key}, neither hpcinit nor another key with ${{{key}}}{near}"


def references(document: Any) -> Iterator[tuple[str, str]]:
    """Every (key, text) whose text has an interpolation in it."""
    return ((key, text) for key, text in texts(document) if "${" in text)


def texts(document: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every (key, text) of a config as plain containers."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield from texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(document, list):
        for at, value in enumerate(document):
            yield from texts(value, f"{key}[{at}]")
    elif isinstance(document, str):
        yield key, document


def with_ids_as_text(overrides: Sequence[str]) -> list[str]:
    """after=4242_7 with its id in quotes: to Hydra it is the number 42427, as in Python."""
    return [
        re.sub(r"(?<![\w'\"./-])(\d+_\d+)(?![\w'\"./-])", r"'\1'", override) if _key(override) in WAITS else override
        for override in overrides
    ]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def not_overrides(given: Sequence[str]) -> list[str]:
    """Those that are neither KEY=VALUE nor ~KEY."""
    return [word for word in given if "=" not in word and not word.startswith("~")]


def _is_bare(word: str) -> bool:
    return "=" not in word and not word.startswith(("-", "~"))


def _flag(word: str, value: str) -> str:
    """`--wait`, `--nodes 4`, `--nodes=4`, `-N4`, `--constraint=x`."""
    name, _, inline = word.lstrip("-").partition("=")
    if not word.startswith("--") and name[:1] in SHORT:
        name, inline = SHORT[name[:1]], name[1:] or inline
    wrong, value = f"{word} {value}".rstrip() + ": no such option, expected key=value", inline or value
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
        return f"{wrong}; one of sbatch's own: +cluster.sbatch.{name}={value}; {_behind(word, value)}"
    return f"{wrong}, as in nodes=4 (hpcinit submit --help shows them all); {_behind(word, value)}"


def _behind(word: str, value: str) -> str:
    return f"one of your program's: -- train.py {word}{f' {value}' * (bool(value) and '=' not in word)}"
