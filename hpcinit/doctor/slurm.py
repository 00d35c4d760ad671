"""Is Slurm there, and does it have what a request needs."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hpcinit.config.schema import Config
from hpcinit.facts import clocks
from hpcinit.facts.checkup import BAD, OK, WARNING, Check
from hpcinit.slurm import client, scontrol

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
# Of sinfo's %T, without the marks *, ~, #, ... : nodes that run jobs, or may.
USABLE = {"idle", "allocated", "mixed", "completing", "reserved", "planned", "powering_up", "powered_down"}
CONTROLLER = "Slurm's controller"
ASK_SITE = "ask the site's support, or wait; SLURM_CONF must be the one of this cluster"


def checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    if config.cluster.engine == "local":
        yield Check("Slurm", OK, f"cluster {config.cluster.name} needs none: this machine plays the nodes")
        return
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        do = "load the slurm module, or go to a login node; cluster=local needs no Slurm"
        yield Check("Slurm", BAD, f"{', '.join(missing)} not on PATH", do)
        return
    yield from _controller(config, env)


def _controller(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    before = time.time()
    text, trouble = _ask(["scontrol", "show", "config"], env)
    after = time.time()
    if trouble:
        yield Check(CONTROLLER, BAD, trouble, ASK_SITE)
        return
    settings = scontrol.config(text)
    version = settings.get("SLURM_VERSION", "?")
    took = f"answers in {after - before:.1f} s"
    slow = after - before > 5
    said = f"{settings.get('ClusterName', '?')}, Slurm {version}, {took}"
    yield Check(CONTROLLER, WARNING if slow else OK, said, "it is overloaded: submit once and wait" if slow else "")
    yield _version(config, version)
    clock = clocks.controllers(text)
    if clock is not None:
        found = clocks.skew(before, after, clock, clock + 1)
        do = "have the clocks synchronised (chronyd): munge refuses what is 300 s old" * (found.grade != OK)
        yield Check("controller's clock", found.grade, str(found), do)
    yield from _nodes(config, env)


def _version(config: Config, version: str) -> Check:
    known = config.cluster.slurm
    if known and known != version:
        do = f"hpcinit discover --name {config.cluster.name} --diff shows what has changed since it was described"
        return Check("Slurm's version", WARNING, f"{version}, and cluster.slurm says {known}", do)
    return Check("Slurm's version", OK, version)


def _nodes(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """States of the partition's nodes. sinfo prints nothing, with exit status 0, of a partition that is not there."""
    name = config.partition or config.cluster.partition
    about = f"partition {name}" if name else "partitions"
    text, trouble = _ask(
        ["sinfo", "--noheader", "--format=%P|%D|%T|%a", *([f"--partition={name}"] if name else [])], env
    )
    if trouble:
        yield Check(about, BAD, trouble, ASK_SITE)
        return
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 3]
    if not rows:
        yield Check(about, BAD, "Slurm has no such partition, or none that you may see", "sinfo shows those there are")
        return
    if not name and any(row[0].endswith("*") for row in rows):  # the default partition
        rows = [row for row in rows if row[0].endswith("*")]
        about = f"partition {rows[0][0].rstrip('*')} (Slurm's default)"
    yield _of_partition(config, about, rows)


def _of_partition(config: Config, about: str, rows: Sequence[Sequence[str]]) -> Check:
    states: Counter[str] = Counter()
    for _, amount, state, _ in rows:
        states[state] += int(amount)
    total = sum(states.values())
    said = f"{total} nodes: {', '.join(f'{amount} {state}' for state, amount in states.most_common())}"
    usable = sum(amount for state, amount in states.items() if _base(state) in USABLE and not state.endswith("*"))
    if any(row[3] != "up" for row in rows):
        return Check(about, BAD, f"{said}; it is {rows[0][3]}", "another partition=..., or wait: jobs do not start")
    if usable < config.nodes:
        return Check(about, BAD, f"{said}; usable: {usable}, asked for: {config.nodes}", "fewer nodes=..., or wait")
    return Check(about, OK, said)


def _base(state: str) -> str:
    return state.rstrip("*~#!%$@^-+")


def _ask(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """What it printed, and '' or why there is no answer."""
    try:
        done = client.run(command, env)
    except client.Unreachable as error:
        return "", str(error)
    if done.status:
        return "", f"`{' '.join(command[:3])}` failed: {done.error.splitlines()[-1]}"
    return done.stdout, ""
