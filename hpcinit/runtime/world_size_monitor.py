"""Report a process group whose world size differs from the job's.

hpcinit.init() checks its own group. For programs that do not use hpcinit, one small process per node looks at the
environment of this run's processes in /proc. So it finds ranks of torchrun, accelerate, DeepSpeed's launcher and MPI,
which get the world size in variables. It does not find ranks that set these variables themselves (mp.spawn).
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcinit.base import processes
from hpcinit.base.console import say
from hpcinit.base.errors import HpcinitError
from hpcinit.records import components, run_folder, world_size
from hpcinit.records.spec import Spec, load
from hpcinit.records.world_size import WrongWorldSize
from hpcinit.world import ENV_WORLD, World, launchers
from hpcinit.world.launchers.torch_variables import torch_variables, torchrun

# Seconds between two looks at /proc, 13 minutes in total. Most launchers start their ranks within seconds; some scripts
# copy data first.
PAUSES_S = (3, 3, 6, 12, 24, 48, 96, 192, 384)
OTHERS = ("torchrun", "openmpi", "mpich", "horovod")


def check_own_group(env: Mapping[str, str], world: World) -> None:
    """Report the group of this rank, if it is rank 0 of a group that differs from the job's. Raise nothing."""
    folder = env.get(run_folder.ENV_FOLDER)
    if not folder or world.rank != 0 or env.get(launchers.ENV_STARTED_BY):  # the user has chosen this size
        return
    with contextlib.suppress(Exception):  # monitoring never ends a training run
        spec = load(Path(folder) / run_folder.SPEC)
        if _differs(spec, world) and world.job != env.get(ENV_WORLD):
            found = _finding(spec, [world], world.host, os.getpid())
            say(f"warning: {found}")
            world_size.record(Path(folder), found)


def start(folder: Path, spec: Spec, world: World) -> None:
    """Start the process that looks for other groups on this node. It ends at the latest when this process ends.

    It is no child of this process, because a program that waits for all of its children would wait for it.
    """
    if world.local_rank != 0:
        return
    try:
        ended = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # not Linux 5.3 or later
        return
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            with contextlib.suppress(BaseException):
                _look(ended, folder, spec, world)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(ended)


def _look(ended: int, folder: Path, spec: Spec, world: World) -> None:
    os.setsid()
    processes.set_title("hpcinit: world size monitor")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a reader of the program's output must not wait for this process
        os.dup2(nothing, stream)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    for pause_s in PAUSES_S:
        if poll.poll(pause_s * 1000):
            return
        if found := find(folder, spec, world.host):
            if world_size.record(folder, found):
                with (folder / run_folder.RANK_LOG.format(rank=world.rank)).open("a") as log:
                    log.write(f"hpcinit: warning: {found}\n")
            return


def find(folder: Path, spec: Spec, host: str, proc: Path = Path("/proc")) -> WrongWorldSize | None:
    """Return a finding if processes of this run on this node belong to a group that differs from the job's.

    Several groups are wrong even if each has the job's size: a torchrun of two ranks in each of two ranks.
    """
    groups: dict[str, tuple[World, int]] = {}
    for pid, env in _environments(folder, proc):
        for launcher in launchers.LAUNCHERS:
            if launcher.NAME in OTHERS and launcher.present(env) and not torchrun.by_our_agent(env):
                with contextlib.suppress(HpcinitError):
                    group = launcher.read(env)
                    groups.setdefault(group.job, (group, pid))
        with contextlib.suppress(HpcinitError):  # launchers that leave no other variables, such as DeepSpeed's
            if torch_variables.many(env) and not torchrun.present(env) and env["WORLD_SIZE"] != str(spec.world_size):
                group = torch_variables.read(env)
                groups.setdefault(group.job, (group, pid))
    wrong = [found for found in groups.values() if _differs(spec, found[0])]
    if not wrong and len(groups) > 1 and any(part.ranks_per_node > 1 for part in spec.parts):
        wrong = list(groups.values())
    return _finding(spec, [group for group, _ in wrong], host, wrong[0][1]) if wrong else None


def _environments(folder: Path, proc: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield process id and environment of each visible process of this run."""
    mark = f"{run_folder.ENV_FOLDER}={folder}".encode()
    for process in sorted(proc.iterdir()):
        try:
            entries = (process / "environ").read_bytes().split(b"\0") if process.name.isdecimal() else []
        except OSError:  # it has ended, or belongs to another user
            continue
        if mark in entries:
            yield int(process.name), dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)


def _differs(spec: Spec, group: World) -> bool:
    """Compare a group with the submission. Only torchrun knows exactly on how many nodes its group is."""
    return world_size.differs(spec, group.world_size, group.nodes if group.launcher == torchrun.NAME else spec.nodes)


def _finding(spec: Spec, groups: Sequence[World], host: str, pid: int) -> WrongWorldSize:
    first = groups[0]
    launcher = {"env": "another launcher", "single": "no launcher"}.get(first.launcher, first.launcher)
    host = host or os.uname().nodename
    return WrongWorldSize(
        launcher, first.world_size, len(groups), host, pid, spec.world_size, components.shape(spec.parts)
    )
