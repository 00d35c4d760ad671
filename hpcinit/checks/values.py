"""Checks single values: their choices and bounds, names, and every text that becomes part of the script."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeVar

from hpcinit.base import quoting
from hpcinit.base.text import expanded, unknown_user
from hpcinit.config import keys
from hpcinit.config.request import as_text
from hpcinit.config.schema import Config
from hpcinit.records import secret_names

T = TypeVar("T")
LONGEST_NAME = 240  # file systems allow 255 bytes, and -0001 and the suffix of a temporary file must fit


def declared(config: Config) -> Iterator[str]:
    """Yield a message for each value that is not among the choices or within the bounds that the schema declares."""
    for key, item in keys.declared().items():
        value, about = keys.value(config, key), item.metadata
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if about["choices"] and value not in keys.choices(key):
            yield f"{key} is {value!r}, expected {keys.expected(key)}"
        elif about["filled"] and value == "":
            yield f"{key} is '', expected {about['filled']}"
        elif not isinstance(value, (int, float)):
            continue
        elif about["least"] is not None and value < about["least"]:
            yield f"{key} is {shown}, expected {about['least']} or more"
        elif about["above"] is not None and value <= about["above"]:
            yield f"{key} is {shown}, expected more than {about['above']}"
        elif about["most"] is not None and value > about["most"]:
            yield f"{key} is {shown}, expected at most {about['most']}"


def finite(config: Config) -> Iterator[str]:
    for key, value in _leaves("", config, float):
        if not math.isfinite(value):
            yield f"{key} is {value}, expected a finite number"


def names(config: Config) -> Iterator[str]:
    if not quoting.PLAIN_NAME.fullmatch(config.name):
        yield (
            f"name is {config.name!r}, expected letters, digits, '.', '_' and '-' only, starting with a letter or a "
            "digit: the names of the job and of the run folder contain it"
        )
    elif len(config.name) > LONGEST_NAME:
        yield (
            f"name has {len(config.name)} characters, expected at most {LONGEST_NAME}, because the run folder has this "
            "name"
        )
    for key, env in (("cluster.env", config.cluster.env), ("job.env", config.job.env)):
        for name in env:
            if not quoting.ENV_NAME.fullmatch(name):
                yield f"{key} has {name!r}, expected a name of letters, digits and '_'"
            value = env[name]
            if not isinstance(value, str):
                yield f"{key}.{name} is {as_text(value)}, expected text in quotes"


def texts(config: Config) -> Iterator[str]:
    """Yield a message for each text that must not become part of the script.

    The program's arguments are not restricted, because they are passed in spec.json.
    """
    for key in ("job.args", "cluster.modules", "cluster.setup"):
        for item in keys.value(config, key):
            if not isinstance(item, str):
                yield f"{key} has {item!r}, expected a list of strings; quote an item that contains brackets or ': '"
    for key, text in _leaves("", config, str):
        if key == "name" or key.startswith("deepspeed."):  # names() checks the name; deepspeed.* is only in spec.json
            continue
        if key.startswith(("job.args", "job.script", "job.module", "job.command", "cluster.setup")):
            if "\0" in text:
                yield f"{key} contains a NUL character, which cannot be passed to a program; remove it"
        elif reason := quoting.unsafe(text):
            secret = secret_names.named(key.rpartition(".")[2]) and not key.startswith("secrets.")  # a path
            shown = secret_names.HIDDEN if secret else repr(text)
            yield f"{key} is {shown}: it {reason}, which is not allowed in the script; remove it"
    for key, place in (("runs_dir", config.runs_dir), ("job.workdir", config.job.workdir or ".")):
        path = str(expanded(place).absolute())
        if user := unknown_user(place):
            yield f"{key} is {place!r}, and there is no user {user!r}; expected a folder, or ~/... for one in your home"
        elif not quoting.unsafe(place) and (reason := quoting.unsafe_path(path)):
            yield f"{key} is the folder {path!r}: its name {reason}, which sbatch would misread; use another folder"


def _leaves(prefix: str, value: object, kind: type[T]) -> Iterator[tuple[str, T]]:
    if isinstance(value, kind):
        yield prefix, value
    elif fields := getattr(type(value), "__dataclass_fields__", None):
        for name in fields:
            item = getattr(value, name)
            if item is not None and (isinstance(item, kind) or not isinstance(item, (str, int, float))):
                yield from _leaves(f"{prefix}.{name}" if prefix else name, item, kind)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(f"{prefix}.{name}", str(name), kind)
            yield from _leaves(f"{prefix}.{name}", item, kind)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(prefix, item, kind)
