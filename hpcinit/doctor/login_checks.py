"""Checks the login node: versions, Slurm, config, folders and clocks."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcinit.base import safe_files, versions
from hpcinit.base.errors import HpcinitError
from hpcinit.base.text import counted, expanded, home
from hpcinit.checks import all_checks
from hpcinit.config import job_spec
from hpcinit.config.resources import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.deepspeed import deepspeed_versions
from hpcinit.doctor import clock_skew
from hpcinit.records import node_records
from hpcinit.records.check_results import FAIL, OK, WARNING, Check
from hpcinit.slurm import scontrol, slurm_client

# Checks of folders: whether they exist, are writable and have free space, and whether the file server's clock is right.

LITTLE_GB, FEW_FILES = 1.0, 1000  # with less free space or fewer free files, the check is a warning
OF_ONE_MACHINE = ("tmpfs", "ramfs", "overlay", "squashfs")  # compute nodes do not share these file systems
# Variables of libraries' caches, and their default below the home folder.
CACHES = {"HF_HOME": ".cache/huggingface", "TORCH_HOME": ".cache/torch"}
FREE_SPACE = "free some space, or choose another folder"


def folder_checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """Yield one check for each folder that a submission or its job writes to."""
    yield from _runs_dir(config)
    for key, place in (("cluster.scratch", config.cluster.scratch), ("cluster.cache", config.cluster.cache)):
        if place:
            yield _folder(key, expanded(os.path.expandvars(place)), absent=WARNING)
    if home() == Path(os.devnull):
        detail = f"not found: HOME is not set, and uid {os.getuid()} has no entry in /etc/passwd"
        yield Check("home folder", FAIL, detail, "export HOME=/path/of/your/folder")
        return
    if not config.cluster.cache:
        for name, below in CACHES.items():
            yield _folder(name, Path(env.get(name) or home() / below), absent=OK)
    yield _folder("table of excluded nodes", node_records.folder(env), absent=OK)


def _runs_dir(config: Config) -> Iterator[Check]:
    """Yield a check of runs_dir, and a check of the clock of its file server."""
    path = expanded(config.runs_dir).absolute()
    found = _folder("runs_dir", path, absent=OK)
    kind = safe_files.file_system(_existing(path))
    if found.status == OK and config.engine.other_machines and kind in OF_ONE_MACHINE:
        advice = "set runs_dir=... to a folder on a file system that all nodes share"
        found = Check("runs_dir", WARNING, f"{found.detail}; it is on {kind}, which other machines cannot see", advice)
    yield found
    if found.status == FAIL:
        return
    before, at, after = _write_file(_existing(path))
    clock = clock_skew.clock_skew(before, after, at)
    advice = "ask the site to synchronize the clocks (chronyd): the file server sets the times in run folders"
    yield Check("file server's clock", clock.status, str(clock), advice if clock.status != OK else "")


def _folder(about: str, path: Path, absent: str) -> Check:
    """Check a folder: whether it is writable and has free space.

    absent: the status to report if the folder does not exist on this machine. OK: the job will create the folder.
    """
    there = _existing(path)
    if there != path and absent != OK:
        return Check(about, absent, f"{path} does not exist here", "nothing to do if it exists on the compute nodes")
    try:
        _write_file(there)
        disk = os.statvfs(there)
    except OSError as error:
        if "." in about or about == "runs_dir":
            advice = f"set {about}=... to another folder"
        else:
            advice = f"set {about if about in CACHES else 'XDG_STATE_HOME'} to a folder that you can write to"
        return Check(about, FAIL, f"cannot write in {there}: {error.strerror}", advice)
    free_gb, files = disk.f_bavail * disk.f_frsize / 2**30, disk.f_favail
    detail = f"{path}{' can be created' if there != path else ''}, {free_gb:.1f} GB free"
    if disk.f_blocks and free_gb < LITTLE_GB:
        return Check(about, WARNING, detail, FREE_SPACE)
    if disk.f_files and files < FEW_FILES:
        return Check(about, WARNING, f"{detail}, but only {files} free inodes", FREE_SPACE)
    return Check(about, OK, detail)


def _existing(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next((place for place in (path, *path.parents) if place.exists()), path)


def _write_file(folder: Path) -> tuple[float, float, float]:
    """Write and remove a file. Return this machine's time before, the time of the file, and this machine's time after.

    The file isn't empty, because the time of an empty file may be from this machine instead of the server. Raise
    OSError if the file can't be written.
    """
    before = time.time()
    descriptor, name = tempfile.mkstemp(prefix=".hpcinit-", dir=folder)
    try:
        os.write(descriptor, b"written by hpcinit doctor\n")
        os.fsync(descriptor)
        at = os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        os.unlink(name)  # noqa: PTH108
    # The kernel gives a file the time of its last tick, up to 10 ms ago (CONFIG_HZ=100).
    return before - 0.01, at, time.time()


# Slurm: its commands, its controller, and the nodes of the partition.

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
# States of sinfo's %T, without the suffixes *, ~, #, ..., of nodes that can run jobs.
USABLE = {"idle", "allocated", "mixed", "completing", "reserved", "planned", "powering_up", "powered_down"}
CONTROLLER = "Slurm's controller"
ASK_SITE = "wait, or ask the site; if SLURM_CONF is set, it must be the path of this cluster's slurm.conf"


def slurm_checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """Yield the checks of Slurm. Stop after a failure that makes the next checks impossible."""
    if not config.engine.uses_slurm:
        yield Check("Slurm", OK, f"not needed: cluster {config.cluster.name} runs on this machine")
        return
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        advice = "load the slurm module, or log in to a login node; cluster=local needs no Slurm"
        yield Check("Slurm", FAIL, f"{', '.join(missing)} not found on PATH", advice)
        return
    yield from _controller_checks(config, env)


def _controller_checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """Yield checks of the controller (its reply, its version, its clock) and of the partition."""
    before = time.time()
    text, problem = _query(["scontrol", "show", "config"], env)
    after = time.time()
    if problem:
        yield Check(CONTROLLER, FAIL, problem, ASK_SITE)
        return
    settings = scontrol.config(text)
    version = settings.get("SLURM_VERSION", "?")
    took = f"answered in {after - before:.1f} s"
    slow = after - before > 5
    detail = f"{settings.get('ClusterName', '?')}, Slurm {version}, {took}"
    advice = "the controller is overloaded: submit once, and wait" if slow else ""
    yield Check(CONTROLLER, WARNING if slow else OK, detail, advice)
    yield _version(config, version)
    clock = clock_skew.controller_clock(text)
    if clock is not None:
        found = clock_skew.clock_skew(before, after, clock, clock + 1)
        advice = "ask the site to synchronize the clocks (chronyd): munge refuses credentials that are 300 s old"
        yield Check("controller's clock", found.status, str(found), advice if found.status != OK else "")
    yield from _partition_checks(config, env)


def _version(config: Config, version: str) -> Check:
    described = config.cluster.slurm
    if described and described != version:
        advice = f"see what has changed in the cluster file: hpcinit discover --name {config.cluster.name} --diff"
        return Check("Slurm's version", WARNING, f"{version}, but cluster.slurm is {described}", advice)
    return Check("Slurm's version", OK, version)


def _partition_checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """Yield a check of the states of the partition's nodes."""
    name = config.partition or config.cluster.partition
    about = f"partition {name}" if name else "partitions"
    text, problem = _query(
        ["sinfo", "--noheader", "--format=%P|%D|%T|%a", *([f"--partition={name}"] if name else [])], env
    )
    if problem:
        yield Check(about, FAIL, problem, ASK_SITE)
        return
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 3]
    if not rows:  # sinfo prints nothing about a partition that does not exist, and exits with status 0
        yield Check(about, FAIL, "Slurm has no such partition, or you cannot see it", "list the partitions with: sinfo")
        return
    if not name and any(row[0].endswith("*") for row in rows):  # sinfo marks the default partition with *
        rows = [row for row in rows if row[0].endswith("*")]
        about = f"partition {rows[0][0].rstrip('*')} (Slurm's default)"
    yield _of_partition(config, about, rows)


def _of_partition(config: Config, about: str, rows: Sequence[Sequence[str]]) -> Check:
    """Return the check of one partition.

    rows: the name, the number of nodes, their state and the partition's availability, from sinfo.
    """
    states: Counter[str] = Counter()
    for _, amount, state, _ in rows:
        states[state] += int(amount)
    total = sum(states.values())
    detail = f"{counted(total, 'node')}: {', '.join(f'{amount} {state}' for state, amount in states.most_common())}"
    usable = sum(
        amount for state, amount in states.items() if state.rstrip("*~#!%$@^-+") in USABLE and not state.endswith("*")
    )
    if any(row[3] != "up" for row in rows):
        advice = "choose another partition, or wait: this one starts no jobs"
        return Check(about, FAIL, f"{detail}; the partition is {rows[0][3]}", advice)
    if usable < config.nodes:
        detail += f"; usable: {usable}, requested: {config.nodes}"
        return Check(about, FAIL, detail, "request fewer nodes=..., or wait")
    return Check(about, OK, detail)


def _query(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """Run a Slurm command and return (its output, ''). If it fails, return ('', the reason)."""
    try:
        done = slurm_client.run(command, env)
    except slurm_client.Unreachable as error:
        return "", str(error)
    if done.status:
        return "", f"`{' '.join(command[:3])}` failed: {done.error.splitlines()[-1]}"
    return done.stdout, ""


def login_checks(config: Config, document: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Check]:
    """Yield all checks of the login node, in the order in which problems should be fixed."""
    yield from version_checks(config)
    with slurm_client.on_cluster(config.cluster.clusters):
        yield from slurm_checks(config, env)
    yield from _config_check(config, document)
    yield from folder_checks(config, env)
    yield from _shell_check(config, env)


def version_checks(config: Config | None) -> Iterator[Check]:
    """Yield checks of the versions of hpcinit and its dependencies.

    config: the request's config, or None if it has errors.
    """
    yield Check("hpcinit", OK, f"{versions.installed('hpcinit') or 'not installed'}, in {Path(__file__).parents[1]}")
    yield Check("Python", OK, f"{platform.python_version()}, {sys.executable}")
    installed = [f"{name} {versions.installed(name) or 'missing'}" for name in ("submitit", "hydra-core", "omegaconf")]
    yield Check("dependencies", OK, ", ".join(installed))
    other = _other_python(config) if config else ""
    yield _torch_check(other)
    deepspeed = versions.installed("deepspeed")
    needed = config is not None and job_spec.uses_deepspeed(config)
    if needed and not deepspeed and not other:
        yield Check("deepspeed", FAIL, "not installed, but this request needs it", "pip install deepspeed")
    elif deepspeed and not other and (older := deepspeed_versions.too_old(deepspeed)):
        yield Check("deepspeed", FAIL if needed else WARNING, older, deepspeed_versions.UPDATE)
    elif deepspeed and not other and (newer := versions.newer_than_tested("deepspeed", deepspeed)):
        yield Check("deepspeed", WARNING, newer, _advice_on_newer("deepspeed"))
    else:
        yield Check("deepspeed", OK, deepspeed or "not installed here")


def _torch_check(other: str) -> Check:
    """Check the installed torch.

    other: the setting that gives the ranks a different Python, or ''.
    """
    found = versions.installed("torch")
    if other:
        return Check("torch", OK, f"not checked: the ranks use {other}; on this machine: {found or 'not installed'}")
    if not found:
        return Check("torch", FAIL, "not installed, but the ranks use this Python", "pip install torch")
    oldest = versions.TESTED["torch"].oldest
    if versions.key(found) < versions.key(oldest):
        return Check("torch", FAIL, f"{found}, expected {oldest} or newer", f"pip install 'torch>={oldest}'")
    if newer := versions.newer_than_tested("torch", found):
        return Check("torch", WARNING, newer, _advice_on_newer("torch"))
    return Check("torch", OK, f"{found} (installed; not imported here)")


def _advice_on_newer(package: str) -> str:
    newest = versions.TESTED[package].newest
    return f"nothing to do if your job works; otherwise: pip install '{package}<={newest}'"


def _other_python(config: Config) -> str:
    """Return the setting that gives the ranks a different Python than this one, or '' if there is none."""
    cluster = config.cluster
    for key, value in (
        ("container.image", config.container.image),
        ("cluster.venv", cluster.venv),
        ("cluster.conda", cluster.conda),
        ("cluster.python", cluster.python),
    ):
        if value:
            return f"{key}={value}"
    return "modules of the cluster" if cluster.modules else ""


def _config_check(config: Config, document: Mapping[str, Any]) -> Iterator[Check]:
    try:
        all_checks.check(config, document)
    except HpcinitError as error:
        for problem in getattr(error, "problems", None) or [str(error)]:
            yield Check("config", FAIL, problem)
        return
    per_node = ranks_per_node(config)
    shape = f"{counted(config.nodes, 'node')} x {counted(per_node, 'rank')}"
    yield Check("config", OK, f"cluster {config.cluster.name}, {shape}: no problem")


def _shell_check(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """Yield a warning if this shell runs inside a job."""
    inside = env.get("SLURM_JOB_ID")
    if inside and config.engine.uses_slurm:
        advice = "nothing to do if this is intended; otherwise submit from a login shell"
        yield Check("this shell", WARNING, f"it runs inside job {inside}", advice)
