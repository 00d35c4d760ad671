"""Checks on the login node, before anything is queued: versions, Slurm, folders, clocks."""

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

from hpcinit.base import versions
from hpcinit.base.errors import HpcinitError
from hpcinit.base.text import expanded, home
from hpcinit.config import job_spec
from hpcinit.config.schema import Config
from hpcinit.doctor import check_results, private_names
from hpcinit.doctor.check_results import FAIL, OK, WARNING, Check
from hpcinit.records import node_records
from hpcinit.slurm import scontrol, slurm_client
from hpcinit.submit import job_environment
from hpcinit.submit import transaction as submission

# Folders that a submission and its job write to: there, writable, with room, on a file server whose clock is right.

LITTLE_GB, FEW_FILES = 1.0, 1000  # below this a warning
OF_ONE_MACHINE = ("tmpfs", "ramfs", "overlay", "squashfs")  # file systems that no compute node shares
# Where libraries keep what they download or compile, and their default below the home folder.
CACHES = {"HF_HOME": ".cache/huggingface", "TORCH_HOME": ".cache/torch"}
ROOM = "free some space, or choose another"


def folder_checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    yield from _runs_dir(config)
    for key, place in (("cluster.scratch", config.cluster.scratch), ("cluster.cache", config.cluster.cache)):
        if place:
            yield _folder(key, expanded(os.path.expandvars(place)), absent=WARNING)
    if home() == Path(os.devnull):
        said = f"there is none: HOME is not set, and uid {os.getuid()} has no entry in /etc/passwd"
        yield Check("home folder", FAIL, said, "export HOME=... with a folder of yours")
        return
    if not config.cluster.cache:
        for name, below in CACHES.items():
            yield _folder(name, Path(env.get(name) or home() / below), absent=OK)
    yield _folder("what is known of bad nodes", node_records.folder(env), absent=OK)


def _runs_dir(config: Config) -> Iterator[Check]:
    path = expanded(config.runs_dir).absolute()
    found = _folder("runs_dir", path, absent=OK)
    kind = _file_system(_there(path))
    if found.grade == OK and config.cluster.engine == "slurm" and kind in OF_ONE_MACHINE:
        do = "runs_dir=... on a file system that all nodes share"
        found = Check("runs_dir", WARNING, f"{found.said}; {kind}, which other machines do not see", do)
    yield found
    if found.grade == FAIL:
        return
    before, at, after = _touched(_there(path))
    clock = check_results.clock_skew(before, after, at)
    do = "have the clocks synchronised (chronyd): times in run folders are the file server's" * (clock.grade != OK)
    yield Check("file server's clock", clock.grade, str(clock), do)


def _folder(about: str, path: Path, absent: str) -> Check:
    """absent: the grade of a folder that is not there and could be made, or lies on the nodes only."""
    there = _there(path)
    if there != path and absent != OK:
        return Check(about, absent, f"{path} is not here", "nothing, if it is on the compute nodes only")
    try:
        _touched(there)
        disk = os.statvfs(there)
    except OSError as error:
        do = f"{about}=... elsewhere" if "." in about or about == "runs_dir" else f"set {about} to a folder of yours"
        if about not in ("runs_dir", *CACHES) and "." not in about:
            do = "set XDG_STATE_HOME to a folder of yours"
        return Check(about, FAIL, f"cannot write in {there}: {error.strerror}", do)
    free_gb, files = disk.f_bavail * disk.f_frsize / 2**30, disk.f_favail
    said = f"{path}{' can be made' if there != path else ''}, {free_gb:.1f} GB free"
    if disk.f_blocks and free_gb < LITTLE_GB:
        return Check(about, WARNING, said, ROOM)
    if disk.f_files and files < FEW_FILES:
        return Check(about, WARNING, f"{said}, and room for {files} more files", ROOM)
    return Check(about, OK, said)


def _there(path: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    return next((place for place in (path, *path.parents) if place.exists()), path)


def _touched(folder: Path) -> tuple[float, float, float]:
    """A file is written and removed: this machine's clock before, the file's, and this machine's after. Raises OSError.

    With content: a file that is only made may get its time from here, where one that is written has the server's.
    """
    before = time.time()
    descriptor, name = tempfile.mkstemp(prefix=".hpcinit-", dir=folder)
    try:
        os.write(descriptor, b"hpcinit doctor was here\n")
        os.fsync(descriptor)
        at = os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        os.unlink(name)  # noqa: PTH108
    # A kernel's files have the time of its last tick, up to 10 ms before (CONFIG_HZ=100).
    return before - 0.01, at, time.time()


def _file_system(path: Path) -> str:
    """'nfs4', 'lustre', 'tmpfs': of the mount that holds `path`; '' where Linux does not say."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for words in (line.split() for line in mounts):
        point = words[1].replace("\\040", " ")
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best):
            best, kind = point, words[2]
    return kind


# Is Slurm there, and does it have what a request needs.

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
# Of sinfo's %T, without the marks *, ~, #, ... : nodes that run jobs, or may.
USABLE = {"idle", "allocated", "mixed", "completing", "reserved", "planned", "powering_up", "powered_down"}
CONTROLLER = "Slurm's controller"
ASK_SITE = "ask the site's support, or wait; SLURM_CONF must be the one of this cluster"


def slurm_checks(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    if config.cluster.engine == "local":
        yield Check("Slurm", OK, f"cluster {config.cluster.name} needs none: this machine plays the nodes")
        return
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        do = "load the slurm module, or go to a login node; cluster=local needs no Slurm"
        yield Check("Slurm", FAIL, f"{', '.join(missing)} not on PATH", do)
        return
    yield from _controller(config, env)


def _controller(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    before = time.time()
    text, trouble = _ask(["scontrol", "show", "config"], env)
    after = time.time()
    if trouble:
        yield Check(CONTROLLER, FAIL, trouble, ASK_SITE)
        return
    settings = scontrol.config(text)
    version = settings.get("SLURM_VERSION", "?")
    took = f"answers in {after - before:.1f} s"
    slow = after - before > 5
    said = f"{settings.get('ClusterName', '?')}, Slurm {version}, {took}"
    yield Check(CONTROLLER, WARNING if slow else OK, said, "it is overloaded: submit once and wait" if slow else "")
    yield _version(config, version)
    clock = check_results.controllers(text)
    if clock is not None:
        found = check_results.clock_skew(before, after, clock, clock + 1)
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
        yield Check(about, FAIL, trouble, ASK_SITE)
        return
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 3]
    if not rows:
        yield Check(about, FAIL, "Slurm has no such partition, or none that you may see", "sinfo shows those there are")
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
        return Check(about, FAIL, f"{said}; it is {rows[0][3]}", "another partition=..., or wait: jobs do not start")
    if usable < config.nodes:
        return Check(about, FAIL, f"{said}; usable: {usable}, asked for: {config.nodes}", "fewer nodes=..., or wait")
    return Check(about, OK, said)


def _base(state: str) -> str:
    return state.rstrip("*~#!%$@^-+")


def _ask(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, str]:
    """What it printed, and '' or why there is no answer."""
    try:
        done = slurm_client.run(command, env)
    except slurm_client.Unreachable as error:
        return "", str(error)
    if done.status:
        return "", f"`{' '.join(command[:3])}` failed: {done.error.splitlines()[-1]}"
    return done.stdout, ""


def login_checks(config: Config, document: Mapping[str, Any], env: Mapping[str, str]) -> Iterator[Check]:
    """All of them, in the order in which they are worth mending."""
    yield from version_checks(config)
    yield from slurm_checks(config, env)
    yield from _config(config, document)
    yield from folder_checks(config, env)
    yield from _environment(config, env)


def version_checks(config: Config | None) -> Iterator[Check]:
    """config: None where there is none that can be used."""
    yield Check("hpcinit", OK, f"{versions.installed('hpcinit') or 'not installed'}, in {Path(__file__).parents[1]}")
    yield Check("Python", OK, f"{platform.python_version()}, {sys.executable}")
    said = [f"{name} {versions.installed(name) or 'missing'}" for name in ("submitit", "hydra-core", "omegaconf")]
    yield Check("submits with", OK, ", ".join(said))
    other = _other_python(config) if config else ""
    yield _torch(other)
    deepspeed = versions.installed("deepspeed")
    needed = config is not None and job_spec.uses_deepspeed(config)
    if needed and not deepspeed and not other:
        yield Check("deepspeed", FAIL, "not installed, and this request needs it", "pip install 'hpcinit[deepspeed]'")
    elif deepspeed and not other and (newer := private_names.newer_than_tested("deepspeed", deepspeed)):
        yield Check("deepspeed", WARNING, newer, _older("deepspeed"))
    else:
        yield Check("deepspeed", OK, deepspeed or "not installed here")


def _torch(other: str) -> Check:
    found = versions.installed("torch")
    if other:
        return Check("torch", OK, f"the ranks run with {other}; here: {found or 'not installed'}")
    if not found:
        return Check("torch", FAIL, "not installed, and the ranks run with this Python", "pip install 'hpcinit[job]'")
    oldest = private_names.TESTED["torch"].oldest
    if versions.key(found) < versions.key(oldest):
        return Check("torch", FAIL, f"{found}, expected {oldest} or newer", f"pip install 'torch>={oldest}'")
    if newer := private_names.newer_than_tested("torch", found):
        return Check("torch", WARNING, newer, _older("torch"))
    return Check("torch", OK, f"{found} (installed; not imported here)")


def _older(package: str) -> str:
    return f"nothing, if your job works with it; else: pip install '{package}<={private_names.TESTED[package].newest}'"


def _other_python(config: Config) -> str:
    """Where the ranks' Python is said to be another one than this; ''."""
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


def _config(config: Config, document: Mapping[str, Any]) -> Iterator[Check]:
    try:
        submission.check(config, document)
    except HpcinitError as error:
        for problem in getattr(error, "problems", None) or [str(error)]:
            yield Check("config", FAIL, problem)
        return
    per_node = config.ranks_per_node or config.cluster.gpus_per_node or 1
    yield Check("config", OK, f"cluster {config.cluster.name}, {config.nodes} x {per_node} ranks: no problem")


def _environment(config: Config, env: Mapping[str, str]) -> Iterator[Check]:
    """What this shell holds that will not reach a job."""
    _, dropped = job_environment.job_environment(
        env, config.secrets, config.secret_names, devices=config.cluster.engine == "slurm"
    )
    inside = env.get("SLURM_JOB_ID")
    if inside and config.cluster.engine == "slurm":
        do = "nothing, if that is meant; else submit from a login shell"
        yield Check("this shell", WARNING, f"is inside of job {inside}", do)
    if dropped.foreign:
        names = ", ".join(dropped.foreign)
        do = f"meant for the job? {' '.join(dropped.instead)}" if dropped.instead else "nothing: they are another job's"
        yield Check("environment", WARNING if dropped.instead else OK, f"not passed on to a job: {names}", do)
    else:
        yield Check("environment", OK, "nothing of another job's")
    for name in dropped.secrets:
        do = f"put it in a file with mode 0600: '+secrets.{name}=FILE'; if it is none: 'secret_names=[-{name}]'"
        yield Check("secrets", WARNING, f"{name} looks like a secret, and is not passed on to a job", do)
    for name, place in config.secrets.items():
        yield Check("secrets", OK, f"{name} is read by the job from {place}")
