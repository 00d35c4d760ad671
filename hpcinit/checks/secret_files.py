"""Checks that no secret would be written to a file in the clear. A job reads its secrets from files with mode 0600."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcinit.base import quoting
from hpcinit.base.text import expanded
from hpcinit.config import overrides
from hpcinit.config.schema import Config
from hpcinit.records import secret_names

HOW = (
    "otherwise put it in a file (umask 077; cat > ~/.{file}, paste, Ctrl-D), "
    'and pass it with "+secrets.{name}=$HOME/.{file}"'
)


def problems(config: Config) -> Iterator[str]:
    """Yield a message for each secret that is written in the config, and for each secret file that can't be used."""
    yield from _written(config)
    for name, place in config.secrets.items():
        if not quoting.ENV_NAME.fullmatch(name):
            yield f"secrets has {name!r}, expected a name of letters, digits and '_'"
        elif name in config.job.env or name in config.cluster.env:
            yield f"secrets.{name} and job.env.{name} (or cluster.env) both set {name}: remove one"
        elif not quoting.unsafe(place):
            yield from _file(name, expanded(place).absolute())


def in_document(document: Mapping[str, Any], patterns: list[str]) -> Iterator[str]:
    """Yield a message for each of the user's own config keys that contains a secret.

    Such a key would be written to config.yaml in the clear.

    patterns: the value of the key secret_names: further patterns for the names of secrets.
    """
    for place, text in overrides.texts(document):
        key = place.partition("[")[0]
        name = key.rpartition(".")[2]
        if key.startswith(("secrets.", "job.env.", "cluster.env.", "job.args", "cluster.setup", "secret_names")):
            continue  # checked by problems()
        if why := secret_names.reason(name, text, patterns):
            yield f"{key} looks like a secret ({why}) and would be written to config.yaml; {_how(name, name.upper())}"


def _written(config: Config) -> Iterator[str]:
    for key, env in (("cluster.env", config.cluster.env), ("job.env", config.job.env)):
        for name, value in env.items():
            if why := secret_names.reason(name, str(value), config.secret_names):
                yield f"{key}.{name} looks like a secret ({why}) and would be written to the script; {_how(name)}"
    for line in config.cluster.setup:
        for name, why in secret_names.in_shell(str(line), config.secret_names):
            yield (
                f"cluster.setup sets {name}, which looks like a secret ({why}) and would be written to the script; "
                f"{_how(name)}"
            )
    words = [str(word) for word in config.job.args]
    for at, name, why in secret_names.in_arguments(words, config.secret_names):
        which, variable = f"the program's argument {name}", re.sub(r"[^A-Za-z0-9_]", "_", name).upper()
        if name == secret_names.ARGUMENT:
            which, variable = f"argument {at + 1} of the program", "MY_TOKEN"
        yield (
            f"{which} looks like a secret ({why}) and would be written to spec.json; {_how(name, variable)}, and read "
            "it from the environment in the program"
        )


def _how(name: str, variable: str = "") -> str:
    """Return advice on how to pass the secret `name`.

    variable: the environment variable that passes the secret; if it is '', use `name`.
    """
    variable = variable or name
    return f"{secret_names.unless(name)}; {HOW.format(name=variable, file=variable.lower())}"


def _file(name: str, path: Path) -> Iterator[str]:
    try:
        found = path.stat()
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        yield f"secrets.{name} is {str(path)!r}, expected a file that you can read: {error.strerror}"
        return
    if not stat.S_ISREG(found.st_mode):
        yield f"secrets.{name} is {str(path)!r}, expected a plain file"
    elif found.st_uid != os.geteuid():
        yield f"secrets.{name} is {str(path)!r}, which belongs to user {found.st_uid}, expected your own file"
    elif found.st_mode & 0o077:
        yield (
            f"secrets.{name} is {str(path)!r} with mode {stat.S_IMODE(found.st_mode):04o}, expected 0600: other users "
            f"can read it; chmod 600 {quoting.shell(str(path))}"
        )
    elif empty:
        yield f"secrets.{name} is {str(path)!r}, which is empty; write the secret to it"
