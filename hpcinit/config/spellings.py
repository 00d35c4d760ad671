"""Translates unambiguous options of Slurm, torchrun and PBS on the command line into hpcinit's keys.

time=24:00:00  ->  time_min=1440        --nodes=8, --nodes 8, -N 8  ->  nodes=8
mem=32G        ->  mem_gb=32            reservation=x               ->  ++cluster.sbatch.reservation=x
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from hpcinit.base.errors import ConfigError
from hpcinit.config import keys
from hpcinit.config.slurm_options import OWN_OF_SBATCH, SAME_VALUE

# Short options of sbatch with one meaning. -q (quiet) and -p (--package) are options of hpcinit and Hydra.
SHORT = {"N": "nodes", "A": "account", "t": "time", "J": "job-name", "G": "gpus", "C": "constraint", "w": "nodelist",
         "x": "exclude", "d": "dependency", "c": "cpus-per-task"}  # fmt: skip
CORES = re.compile(r"-c=?\d*")  # -c 2, -c2; `-c job` is Hydra's --cfg
# Options that mean the same as a key.
SAME = {
    **SAME_VALUE,  # those of sbatch, by the schema
    "tasks-per-node": "ranks_per_node",
    "nproc-per-node": "ranks_per_node",
    "nnodes": "nodes",
    "num-nodes": "nodes",
    # Names without their table. env.X=1 is job.env.X, and env={X: 1} is job.env.
    **{name: f"cluster.{name}" for name in ("venv", "conda", "python", "modules", "setup", "exclusive")},
    "image": "container.image",
    "container": "container.image",
    "cpus": "cpus_per_rank",
}
# [days-]hours:minutes:seconds, and the shorter forms of sbatch --time.
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGT])B?", re.IGNORECASE)
UNITS = {"K": 2**-20, "M": 2**-10, "G": 1, "T": 2**10}
PLAIN = re.compile(r"[\w./:@+-]+")


def translate(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the command line with hpcinit's keys. flags: the options of Hydra, which stay. Raise ConfigError."""
    found: list[str] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, value, separate = _option(argument, rest, flags)
        try:
            translated = _key(name, value) if name else ""
        except ValueError as error:
            translated = ""
            problems.append(f"{argument}{f' {value}' * separate}: {error}")
        found.append(translated or argument)
        if translated and separate:
            rest.pop(0)
    if problems:
        raise ConfigError(*problems)
    return found


def _option(argument: str, rest: Sequence[str], flags: Collection[str]) -> tuple[str, str, bool]:
    """Return the option's name with dashes, its value, and whether that is the next argument; '' if it is none."""
    if not argument.startswith("-"):
        key, equals, value = argument.partition("=")
        own = keys.kind(key) is not None and key not in SAME  # container is a table, which has no value
        return ("", "", False) if own or not equals else (key.replace("_", "-"), value, False)
    cores = CORES.fullmatch(argument) and (argument != "-c" or "".join(rest[:1]).isdigit())
    if argument.partition("=")[0] in flags and not cores:
        return "", "", False
    short = re.fullmatch(rf"-([{''.join(SHORT)}])=?(.*)", argument)
    name, equals, value = argument.removeprefix("--").partition("=")
    if short:
        name, value, equals = SHORT[short[1]], short[2], short[2]
    elif not argument.startswith("--"):
        return "", "", False
    if equals:
        return name, value, False
    following = rest[0] if rest else ""
    return (name, following, True) if following and not re.match(r"[-~+]|\w+=", following) else ("", "", False)


def _key(name: str, value: str) -> str:
    """Return KEY=VALUE for an option of another tool; '' for an unknown one. Raise ValueError for a wrong value."""
    if name == "walltime" and value.isdigit():  # seconds for PBS, minutes for LSF
        raise ValueError("expected a time as in 24:00:00, or time_min=... in minutes")
    if name in ("time", "walltime"):
        return f"time_min={','.join(str(minutes(each)) for each in value.split(','))}"
    if name == "mem":
        return f"mem_gb={','.join(f'{gigabytes(each):g}' for each in value.split(','))}"
    if name in OWN_OF_SBATCH:
        return f"++cluster.sbatch.{name}={_quoted(value)}"
    key = name.replace("-", "_")
    if (key == "env" and value.startswith("{")) or (key.startswith("env.") and "." not in key[4:]):
        return f"++job.{key}={value}"
    if keys.kind(key) is not None and not keys.is_group(key):  # --gpus=2, --dry-run=true
        return f"{key}={value}"
    return f"{SAME[name]}={value}" if name in SAME else ""


def key_of(name: str) -> str:
    """Return the key that is meant by the name of an option or key: cluster.venv for venv; `name` if it is unknown."""
    option = name.replace("_", "-")
    converted = {"time": "time_min", "walltime": "time_min", "mem": "mem_gb"}
    return name if keys.kind(name) is not None else SAME.get(option, converted.get(option, name))


def minutes(text: str) -> int:
    """Return the minutes of a time limit as sbatch reads it: 90, 90:00, 1:30:00, 1-12, 1-12:30 and 1-12:30:00."""
    found = TIME.fullmatch(text)
    if not found:
        raise ValueError("expected a time as in 24:00:00, 1-12:00:00 or 90 (minutes)")
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"] is not None:  # hours first
        hours, mins, seconds = (*parts, 0, 0)[:3]
        hours += 24 * int(found["days"])
    else:  # minutes, minutes:seconds, or hours:minutes:seconds
        hours, mins, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return 60 * hours + mins + math.ceil(seconds / 60)


def gigabytes(text: str) -> float:
    """Return the GB (2^30 bytes) of 32G or 500M; 0 for all memory. A number alone would be MB for sbatch."""
    found = SIZE.fullmatch(text)
    if found:
        return float(found["number"]) * UNITS[found["unit"].upper()]
    if text == "0":
        return 0
    raise ValueError(f"expected a size with a unit, as in {text if text.isdigit() else 32}G")


def _quoted(value: str) -> str:
    """Quote a value for Hydra: as text, with any character except both kinds of quotes."""
    if PLAIN.fullmatch(value) and not re.fullmatch(r"[\d_.eE+-]+|true|false|null", value):
        return value
    return f'"{value}"' if "'" in value else f"'{value}'"
