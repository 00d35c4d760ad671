"""Handles the arguments of the program (after --): replaces references to config keys, and checks sweeps over them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hpcinit.base import console
from hpcinit.base.errors import RequestError
from hpcinit.checks import program_source
from hpcinit.config import keys
from hpcinit.config.request import Request, as_text

# ${lr}, ${model.width}, ${hydra:job.num}; \\${lr} is not replaced
REFERENCE = re.compile(r"(?P<escape>\\?)\$\{(?P<key>[\w.]+|hydra:job\.num)\}")
NUMBER = "hydra:job.num"
MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
# --lr=1,2 or 1e-1,1e-2: what Hydra would sweep
LIST = re.compile(r"(?P<option>--?[\w-]+=)?(?P<values>[^\s,=\[\](){}'\"$]+(?:,[^\s,=\[\](){}'\"$]+)+)")


def given_keys(arguments: Sequence[str]) -> set[str]:
    """Return the config keys that the command line sets."""
    return {argument.partition("=")[0].lstrip("+") for argument in arguments if "=" in argument}


def typed(arguments: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """Return the arguments before `--` of one run, for the record that `hpcinit status` shows.

    parameters: the values of this run in a sweep, such as lr=1e-3. They replace the lists of values.
    """
    elsewhere = given_keys(parameters) | {"job.script", "job.module", "job.command", "job.args"}
    flags = (*MULTIRUN, "job=program")
    return [*(word for word in arguments if word not in flags and not given_keys([word]) & elsewhere), *parameters]


def refuse_own_keys(program: Sequence[str], request: Request, command: Sequence[str]) -> None:
    """Refuse keys of hpcinit after --, which the user probably meant to type before it.

    Raise RequestError if the program's source does not read key=value arguments. If the source is not available, add a
    warning to the request instead.

    command: the command line before --.
    """
    own = [
        argument
        for before, argument in pairwise(program)
        if "=" in argument
        and keys.kind(argument.partition("=")[0].lstrip("+~")) is not None
        and not before.startswith("-")  # --set seed=1
    ]
    path = program_source.source(request.config)
    if not own or (path and program_source.reads_key_values(path)):
        return
    before = [argument for argument in command if argument != "job=program"]
    rest = [argument for argument in program if argument not in own]
    are, them = ("is a key", "it") if len(own) == 1 else ("are keys", "them")
    text = (
        f"{' '.join(own)} after -- {are} of hpcinit, but hpcinit reads only keys before --: "
        f"{shlex.join([*before, *own, '--', *rest])}. If the program reads {them}: "
        f"{shlex.join([*before, '--', '--', *program])}"
    )
    if path:
        raise RequestError(text)
    request.warnings.append(text)


def interpolated(program: Sequence[str], request: Request, given: Collection[str]) -> list[str]:
    """Return the program and its arguments. Replace each ${key} by the value of the key, if the user set the key.

    Any other ${...} stays, because it may be for a shell. Raise RequestError if the value is a list or a dict.

    given: the keys that the user set on the command line.
    """

    def value(found: re.Match[str]) -> str:
        key = found["key"]
        if key not in given and key != NUMBER:
            return found[0]
        request.unread.pop(key, None)
        if found["escape"]:
            return found[0][1:]
        if key in request.typed:
            return request.typed[key]
        found_value = request.number if key == NUMBER else _get(request.document, key)
        if isinstance(found_value, (dict, list)):
            raise RequestError(f"the value of ${{{key}}} after -- is {found_value}, expected a single value")
        return as_text(found_value)

    return [REFERENCE.sub(value, argument) for argument in program]


def _get(document: Mapping[str, Any], key: str) -> Any:
    found: Any = document
    for part in key.split("."):
        found = found[part]
    return found


def check_distinct(requests: Sequence[Request], program: Sequence[str]) -> None:
    """Raise RequestError if two combinations of a sweep would be the same job, unless again=true."""
    seen: dict[str, Request] = {}
    for request in requests:
        first = seen.setdefault(repr(request.config), request)
        if first is request or request.config.again:
            continue
        names = " and ".join(one.combination or f"combination {one.number}" for one in (first, request))
        key = next((key for key in request.unread if key in request.combination), None)
        reason, advice = "", "give each value once"
        if key:
            reason, advice = (
                f", because the program does not get {key}",
                f"pass it to the program, as in: -- {shlex.join(_passing(key, program or ['train.py']))}",
            )
        raise RequestError(
            f"{names} of this sweep would submit the same job twice{reason}: {advice}, or add again=true to submit both"
        )


def _passing(key: str, program: Sequence[str]) -> list[str]:
    """Replace the value of the program's option --key by ${key}. If there is no such option, append ${key}."""
    option, passed = f"--{key.rpartition('.')[2]}", list(program)
    for at, argument in enumerate(passed):
        if argument.replace("_", "-").startswith(f"{option.replace('_', '-')}="):
            passed[at] = f"{argument.partition('=')[0]}=${{{key}}}"
            return passed
        if argument.replace("_", "-") == option.replace("_", "-") and at + 1 < len(passed):
            passed[at + 1] = f"${{{key}}}"
            return passed
    return [*passed, f"${{{key}}}"]


def check_lists(program: Sequence[str], arguments: Sequence[str], combinations: int) -> None:
    """Raise RequestError if an argument after -- is a list such as 1e-1,1e-2, because a sweep does not expand it.

    If the command line sweeps over a key, print a warning instead.
    """
    for at, argument in enumerate(program[1:], 1):
        if not (found := LIST.fullmatch(argument)):
            continue
        option = found["option"] or (program[at - 1] if program[at - 1].startswith("-") else "")
        shown = argument if found["option"] else f"{option} {argument}".strip()
        if combinations > 1:
            console.warning(f"{shown} after -- is not swept: every task gets the whole list")
            continue
        key = re.sub(r"\W", "_", option.strip("-=")) or "x"
        plus = "" if keys.kind(key) is not None else "+"
        swept = [*program[:at], f"{found['option'] or ''}${{{key}}}", *program[at + 1 :]]
        before = shlex.join([one for one in arguments if one != "job=program"])
        raise RequestError(
            f"-m requests a sweep, but {shown} after -- is not swept. To sweep it: hpcinit submit {before} "
            f"{plus}{key}={found['values']} -- {shlex.join(swept)}. To pass the list unchanged, remove -m"
        )
