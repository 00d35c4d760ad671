"""Translates options that users know from Slurm, torchrun or PBS into hpcinit's keys, or into advice.

    time=24:00:00  ->  time_min=1440        --nodes=8, --nodes 8, -N 8  ->  nodes=8
    mem=32G        ->  mem_gb=32            reservation=x               ->  ++cluster.sbatch.reservation=x

The same table lists what to use instead of an option in cluster.sbatch or cluster.srun.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence

from hpcinit.base.errors import ConfigError
from hpcinit.config import keys

# Short options of sbatch with one meaning. -q (quiet) and -p (--package) are options of hpcinit and Hydra.
SHORT = {"N": "nodes", "A": "account", "t": "time", "J": "job-name", "G": "gpus", "C": "constraint", "w": "nodelist",
         "x": "exclude", "d": "dependency", "c": "cpus-per-task", "n": "ntasks", "a": "array", "D": "chdir",
         "o": "output", "e": "error"}  # fmt: skip
ENVIRONMENT = (
    "the job needs its whole environment; set a variable with job.env or cluster.env, remove one with "
    "`env -u NAME hpcinit submit ...`"
)
GPUS = "use gpus_per_node=4 or gpus=8"
RANKS = "set the number of ranks with nodes=2 ranks_per_node=8"
ITSELF = "hpcinit sets it itself"
# Options of sbatch and srun that hpcinit sets, with the key that determines the value.
OWNED = {**keys.options("sbatch"), **keys.options("owns")}
# Common options of sbatch without a key.
PASSED = "constraint reservation exclude nodelist mail-type mail-user licenses begin nice hint"
# Maps an option's name to the key with the same meaning, or to advice, which contains spaces. Later entries replace
# earlier ones of the same name.
TABLE = {
    **{name: f"++cluster.sbatch.{name}" for name in PASSED.split()},
    **{option: f"use {key} instead" for option, key in keys.options("owns").items()},
    **keys.options("sbatch"),
    **{name: OWNED[name] for name in ("gpus", "gpus-per-node", "dependency", "exclusive", "time", "mem")},
    "tasks-per-node": "ranks_per_node",
    "nproc-per-node": "ranks_per_node",
    "nnodes": "nodes",
    "num-nodes": "nodes",
    "walltime": "time_min",
    # Keys that users type without their table. env.X=1 means job.env.X, and env={X: 1} means job.env.
    **{name: f"cluster.{name}" for name in ("venv", "conda", "python", "modules", "setup")},
    "image": "container.image",
    "container": "container.image",
    "cpus": "cpus_per_rank",
    **dict.fromkeys(("gpus-per-task", "gres", "num-gpus"), GPUS),
    "ntasks": RANKS,
    "queue": "use partition=NAME",
    "project": "use account=NAME",
    **dict.fromkeys(("after", "afterany"), "did you mean dependency=afterany:JOB?"),
    **dict.fromkeys(("after-ok", "afterok"), "did you mean dependency=afterok:JOB?"),
    "singleton": "did you mean dependency=singleton?",
    "requeue": "use restart.max_restarts=3, which requeues the job up to 3 times after the failures in restart.on",
    "open-mode": f"{ITSELF}, so that a requeued job appends to its logs",
    **dict.fromkeys(("unbuffered", "parsable"), ITSELF),
    "array": (
        "hpcinit submits sweeps as arrays: give a key several values and --multirun; sweep.at_once limits how many "
        "tasks run at once"
    ),
    **dict.fromkeys(("export", "export-file"), ENVIRONMENT),
    "wrap": "hpcinit writes the script; the program goes after --",
    "test-only": (
        "did you mean validate=...? validate=true does this before each submission; dry_run=true prints the script"
    ),
}
ALLOWED = {"requeue", "gpus-per-task"}  # also allowed in cluster.sbatch and cluster.srun
PRINTS = dict.fromkeys(("help", "usage", "version"), "with this option, Slurm prints text instead of starting a job")
# [days-]hours:minutes:seconds, and the shorter forms of sbatch --time.
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGT])B?", re.IGNORECASE)
UNITS = {"K": 2**-20, "M": 2**-10, "G": 1, "T": 2**10}
PLAIN = re.compile(r"[\w./:@+-]+")


def instead(option: str, command: str) -> str:
    """Return what to use instead of `option` in cluster.sbatch or cluster.srun, or '' if that option is allowed there.

    An unknown name counts as an abbreviation of the first option in TABLE that starts with it.

    command: 'sbatch' or 'srun'.
    """
    if (option, command) == ("wait", "sbatch"):  # srun's --wait has another meaning
        return "use wait=true, which waits until the job ends"
    if option not in TABLE and option not in PRINTS:  # sbatch accepts the start of a name: `arr` would make an array
        option = next((name for name in TABLE if name.startswith(option)), option)
    found = TABLE.get(option, PRINTS.get(option, ""))
    if option in ALLOWED or found.startswith("++"):
        return ""
    return found if " " in found or not found else f"use {found} instead"


def translate(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the command line with other tools' options replaced by hpcinit's keys.

    flags: Hydra's options, which stay as they are.

    Raise ConfigError with all values that can't be translated.
    """
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
    """Return an option's name, its value, and whether the value is the next argument.

    If the argument is not an option, the name is ''. The name has dashes instead of underscores, but no leading dashes.
    """
    name, equals, value = argument.partition("=")
    if not argument.startswith("-"):
        own = keys.kind(name) is not None and name not in TABLE  # container is a table, which has no value
        return ("", "", False) if own or not equals else (name.replace("_", "-"), value, False)
    following = rest[0] if rest and not re.match(r"[-~+]|\w+=", rest[0]) else ""
    cores = re.fullmatch(r"-c=?\d+", argument) or (argument == "-c" and following.isdigit())  # -c job is Hydra's --cfg
    if name in flags and not cores:
        return "", "", False
    if short := re.fullmatch(rf"-([{''.join(SHORT)}])=?(.*)", argument):
        name, value = SHORT[short[1]], short[2]
    elif not argument.startswith("--"):
        return "", "", False
    return (name.removeprefix("--"), value or following, not value and bool(following))


def _key(name: str, value: str) -> str:
    """Return KEY=VALUE for another tool's option, or '' if the option is unknown.

    Raise ValueError, with advice for the user, if hpcinit has no key for it.
    """
    key = name.replace("-", "_")
    if (key == "env" and value.startswith("{")) or (key.startswith("env.") and "." not in key[4:]):
        return f"++job.{key}={value}"
    key = key if keys.kind(key) is not None and not keys.is_group(key) else TABLE.get(name, "")  # --gpus=2, --dry-run
    if " " in key:
        raise ValueError(key)
    if not value:
        return f"{key}=true" if keys.kind(key) is bool else ""
    if name == "walltime" and value.isdigit():  # seconds for PBS, minutes for LSF
        raise ValueError("expected a time as in walltime=24:00:00, or minutes as in time_min=90")
    if convert := CONVERT.get(name):
        value = ",".join(convert(each) for each in value.split(","))
    return f"{key}={_quoted(value) if key.startswith('++') else value}" if key else ""


def key_meant(name: str) -> str:
    """Return the full key for a short name, as in cluster.venv for venv. Return an unknown name unchanged."""
    key = TABLE.get(name.replace("_", "-"), name)
    return name if keys.kind(name) is not None or " " in key else key


def minutes(text: str) -> str:
    """Convert a time limit in sbatch's format to minutes: 90, 90:00, 1:30:00, 1-12, 1-12:30 or 1-12:30:00."""
    found = TIME.fullmatch(text)
    if not found:
        raise ValueError("expected a time as in 24:00:00, 1-12:00:00 or 90 (minutes)")
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"] is not None:  # hours first
        hours, mins, seconds = (*parts, 0, 0)[:3]
        hours += 24 * int(found["days"])
    else:  # minutes, minutes:seconds, or hours:minutes:seconds
        hours, mins, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    return str(60 * hours + mins + math.ceil(seconds / 60))


def gigabytes(text: str) -> str:
    """Convert a size such as 32G or 500M to GB (2^30 bytes). Return 0 unchanged: it means all memory.

    Raise ValueError for a number without a unit, because sbatch would read it as MB.
    """
    found = SIZE.fullmatch(text)
    if found:
        return f"{float(found['number']) * UNITS[found['unit'].upper()]:g}"
    if text == "0":
        return text
    raise ValueError(f"expected a size with a unit, as in {text if text.isdigit() else 32}G")


CONVERT: dict[str, Callable[[str], str]] = {"time": minutes, "walltime": minutes, "mem": gigabytes}


def _quoted(value: str) -> str:
    """Quote a value as text for Hydra. The value must not contain both kinds of quotes."""
    if PLAIN.fullmatch(value) and not re.fullmatch(r"[\d_.eE+-]+|true|false|null", value):
        return value
    return f'"{value}"' if "'" in value else f"'{value}'"
