"""Check this node before its ranks start, and print what ended jobs have left there.

start() forks a process that checks while the rank itself starts. finish() prints its lines and, with action=replace,
raises an error if ranks should not start here. If the check crashes or hangs (a dead file server, a driver without a
reply), the ranks start without it.

It only reads and prints. It never ends a process and never removes a file, because no check from here can prove that
nothing needs them. What must not be touched, and how it looks like a leftover:

- ranks of another job of this user: squeue omits hidden partitions, and a site's squeue may be cached; the tasks of a
  heterogeneous job have the leader's id, and squeue lists the components
- a tmux or a server that the user started in a job and that outlives it on purpose: it has that job's variables
- tensors in a queue of a program outside of Slurm: with torch's strategy file_system no process maps them, and the pid
  in their name may be that of another pid namespace

A process is reported as a leftover only if scontrol or sacct shows a final state for every job in its environment and
its control group. Nothing is printed if Slurm gives no reply, or if this process is not below a slurmstepd
(cluster=local, a test with the environment of another job).
"""

from __future__ import annotations

import json
import os
import pwd
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.base import failure_kinds, processes, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.records import plain_files, run_folder
from hpcinit.records.spec import OFF, REPLACE, NodeCheck
from hpcinit.records.timeline import ENV_ALLOCATED
from hpcinit.slurm import queue, slurm_client
from hpcinit.world.launchers import slurm_step

if TYPE_CHECKING:
    from hpcinit.records.rank_report import Gpu

# The variables that prove that a process was a task of a step, and of which job and node. The shell of salloc has no
# SLURM_PROCID.
JOB, RESTART, NODE, CLUSTER = "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME", "SLURM_CLUSTER_NAME"
SAME = (NODE, CLUSTER, "SLURM_CONF")  # equal in every task of this node and cluster
NEEDED = (JOB, NODE, CLUSTER, "SLURM_PROCID")
DAEMONS = {"slurmd", "slurmstepd"}
SHARED_MEMORY = Path("/dev/shm")
# torch's (torch_PID_...) and NCCL's segments, which a process keeps mapped. Other programs may close and reopen theirs.
KNOWN_SEGMENTS = re.compile(r"torch_(?P<pid>\d+)_\d+_\d+|nccl-\w+")
MOST_JOBS = 5  # whose state is queried; the ranks wait for the replies
LITTLE_GB = 1.0
MUCH_MB = 1024  # of a GPU's memory: services of the site use less
GB = 2**30
OCCUPIED = 0.5  # of a GPU's memory, in use by another process: training would not fit
SHARING = ("SLURM_SHARDS_ON_NODE", "CUDA_MPS_PIPE_DIRECTORY")  # the site shares GPUs between jobs on purpose
KILL_S = 1.0  # a killed process that has not ended by then hangs in the kernel


@dataclass(frozen=True)
class Task:
    """A process with the environment of a step's task on this node. jobs: all ids in its environment and cgroup."""

    pid: int
    name: str
    jobs: frozenset[str]


@dataclass(frozen=True)
class Running:
    """The check while it runs in process `pid`, which writes to `pipe`. until: its time limit, monotonic."""

    pid: int
    pipe: int
    action: str
    timeout_s: float
    until: float


def start(wanted: NodeCheck, env: Mapping[str, str]) -> Running | None:
    """Start the check of this node; None if it is disabled, another process of the node starts it, or this is no step.

    Call it while this process has one thread, and before it imports torch: the check is a fork of it.
    """
    if wanted.action == OFF or not all(env.get(name) for name in NEEDED) or env.get("SLURM_LOCALID") != "0":
        return None
    if run_folder.ENV_ENGINE in env or not slurm_step.slurm_step_of_this_process().step:
        return None
    try:
        (ours, theirs), parent = os.pipe(), os.getpid()
        pid = os.fork()
    except OSError:  # no process or file is left for this user
        return None
    if pid == 0:
        with suppress(BaseException):
            processes.die_with_parent(parent)
            os.setpgid(0, 0)  # finish() ends this group, with the nvidia-smi in it
            _send_answer(theirs, wanted, env)
        os._exit(0)
    os.close(theirs)
    return Running(pid, ours, wanted.action, wanted.timeout_s, time.monotonic() + wanted.timeout_s)


def _send_answer(pipe: int, wanted: NodeCheck, env: Mapping[str, str]) -> None:
    """Run the checks in the forked process, and write their result to the pipe as JSON."""
    try:
        lines, unusable = check(wanted, env)
        answer = {"lines": lines, "unusable": unusable}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(pipe, "w") as file:
        json.dump(answer, file)


def finish(running: Running | None, folder: Path) -> None:
    """Print what the check found. Raise BringUpError if the ranks should not start on this node. folder: of the run."""
    if running is None:
        return
    node, off = os.environ[NODE], "to disable it: check_node.action=off"
    anyway = f"the ranks start without it; {off}"
    text = _receive_answer(running)
    if text is None:
        if running.action == REPLACE:  # otherwise a slow node would print a line in every job
            say(f"{node}: the check of the node did not end within {running.timeout_s:g} s; {anyway}")
        return
    found = json.loads(text) if text.endswith("}") else {"error": "it ended without an answer"}
    if "error" in found:
        say(f"{node}: the check of the node failed: {found['error']}; {anyway}")
        return
    for line in found["lines"]:
        say(f"{node}: {line}")
    if found["unusable"] and running.action == REPLACE:
        job = f"{os.environ[JOB]}.{os.environ.get(RESTART, '0')}"
        with suppress(OSError):  # the batch script reads it, to replace the node
            record = folder / run_folder.UNUSABLE / f"{job}.{node}"
            safe_files.make_folders(record.parent)
            safe_files.write_atomically(record, plain_files.text({"node": node}))
        raise BringUpError(
            f"{node} cannot be used: {found['unusable']}; expected a free GPU. Submit with "
            f"+cluster.sbatch.exclude={node} or with spare_nodes=1, and report the node to the site; {off}",
            kind=failure_kinds.NODE,
            host_at_fault=node,
        )


def _receive_answer(running: Running) -> str | None:
    """Return what the check wrote, after its end; None if the time is over. The process is killed and reaped then."""
    poll, found, ended = select.poll(), b"", False
    poll.register(running.pipe, select.POLLIN)
    while not ended and poll.poll(max(running.until - time.monotonic(), 0) * 1000):
        part = os.read(running.pipe, 65536)
        found, ended = found + part, not part
    os.close(running.pipe)
    for end in (os.killpg, os.kill):  # by pid too: it may not have made its group yet
        with suppress(ProcessLookupError):
            end(running.pid, signal.SIGKILL)  # it has written all that it will write
    with suppress(ChildProcessError):
        gone = time.monotonic() + KILL_S
        while os.waitpid(running.pid, os.WNOHANG) == (0, 0) and time.monotonic() < gone:
            time.sleep(0.01)  # it may hang in the kernel, which must not stop the rank
    return found.decode(errors="replace") if ended else None


def check(wanted: NodeCheck, env: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the lines to print, and why the ranks should not start on this node, or ''."""
    lines = [*_leftovers(wanted, env), *_free_space(env)]
    unusable = ""
    for line, occupied in _gpu_memory(env):
        lines.append(line)
        unusable = unusable or (line if occupied else "")
    return lines, unusable


def _leftovers(wanted: NodeCheck, env: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each process that ended jobs left, and one for the files."""
    tasks = list(_tasks(env))
    jobs = sorted(frozenset[str]().union(*(task.jobs for task in tasks)))[:MOST_JOBS]
    # Half of the time for all commands, so that the other checks end before this process is killed.
    until = time.monotonic() + wanted.timeout_s / 2
    try:
        ended = {job: queue.has_ended(job, timedelta(seconds=max(until - time.monotonic(), 0.0) / 2)) for job in jobs}
    except slurm_client.Unreachable:
        ended = {}
    for task in tasks:
        answers = {ended.get(job, False) for job in task.jobs}
        if answers == {True} and _task(task.pid, env) == task:
            job = min(task.jobs, key=int)
            yield (
                f"process {task.pid} ({task.name}) of job {job}, which has ended, still runs; if you do not need it: "
                f"kill -9 {task.pid}"
            )
        elif False not in answers and _task(task.pid, env) == task:
            yield (
                f"process {task.pid} ({task.name}) has the environment of job {'+'.join(sorted(task.jobs))}, which "
                "Slurm does not report any more; is it a leftover?"
            )
    yield from _files(_old_segments(float(env.get(ENV_ALLOCATED) or 0)))


def _tasks(env: Mapping[str, str]) -> Iterator[Task]:
    """Yield this user's tasks on this node that are not of this job."""
    own = _jobs(env)
    for pid in _pids():
        task = _task(pid, env)
        if task and not task.jobs & own:
            yield task


def _jobs(env: Mapping[str, str], cgroup: str = "") -> frozenset[str]:
    """Return the job's id, those of its components, and that of a control group."""
    found = {text for name, text in env.items() if name == JOB or name.startswith("SLURM_JOB_ID_HET_GROUP_")}
    found.update(re.findall(r"/job_(\d+)", cgroup))
    return frozenset(text for text in found if text.isdigit())


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _task(pid: int, env: Mapping[str, str]) -> Task | None:
    """Return the process if it is a task of this user on this node of this cluster.

    The network namespace proves the node: nodes that are containers of one machine share /proc.
    """
    place = Path(f"/proc/{pid}")
    try:
        if place.stat().st_uid != os.geteuid():
            return None
        text = (place / "environ").read_bytes()
        if b"SLURM_PROCID=" not in text or (place / "ns/net").readlink() != Path("/proc/self/ns/net").readlink():
            return None
        found = dict(line.split("=", 1) for line in text.decode(errors="replace").split("\0") if "=" in line)
        name = (place / "comm").read_text(errors="replace").strip()
        jobs = _jobs(found, (place / "cgroup").read_text(errors="replace"))
    except OSError:  # it has ended, or is not readable
        return None
    if name in DAEMONS or run_folder.ENV_ENGINE in found or any(found.get(key) != env.get(key) for key in SAME):
        return None
    return Task(pid, name, jobs) if found.get(JOB) and jobs else None


def _old_segments(before: float) -> list[Path]:
    """Return this user's files in /dev/shm that are older than `before`, and that torch or NCCL created.

    Not those with the pid of a process that runs: it may need them.
    """
    found = []
    with suppress(OSError):
        for path in SHARED_MEMORY.iterdir():
            with suppress(OSError):
                about, known = path.lstat(), KNOWN_SEGMENTS.fullmatch(path.name)
                if about.st_uid != os.geteuid() or about.st_mtime >= before or not known:
                    continue
                if not (known["pid"] and Path(f"/proc/{known['pid']}").exists()):
                    found.append(path)
    return found


def _files(files: Sequence[Path]) -> Iterator[str]:
    """Yield a line about those files that no process of this user uses."""
    used = _shared_memory_in_use() if files else set()
    left, size = [path for path in files if str(path) not in used], 0
    for path in left:
        with suppress(OSError):
            size += path.stat().st_blocks * 512
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        yield (
            f"files of torch or NCCL in {SHARED_MEMORY}, older than this job, that none of your processes has open "
            f"({left[0]}{more}, {size / GB:.2f} GB): remove them if none of your programs on this node needs them"
        )


def _shared_memory_in_use() -> set[str]:
    """Return the files in /dev/shm that a process of this user has open or mapped."""
    used: set[str] = set()
    for pid in _pids():
        place = Path(f"/proc/{pid}")
        try:
            if place.stat().st_uid != os.geteuid():
                continue
            maps = (place / "maps").read_text(errors="replace")
            used.update(line[line.index("/dev/shm/") :] for line in maps.splitlines() if "/dev/shm/" in line)
            for link in (place / "fd").iterdir():
                with suppress(OSError):
                    used.add(str(link.readlink()))
        except OSError:  # it has ended, or it has more privileges than this process, as init has, and no job started it
            continue
    return used


def _free_space(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each folder for temporary files that is full or not writable."""
    from hpcinit.jobs import node_probe  # noqa: PLC0415 - only the check's side needs it

    for place in node_probe.folders(env):
        if place.error and not Path(place.path).exists():
            continue  # a TMPDIR of the login node; Python uses /tmp then
        if place.error:
            yield f"{place.what} {place.path} is not writable: {place.error}"
        elif place.free_gb < min(LITTLE_GB, place.total_gb / 2):
            yield f"{place.what} {place.path} has {place.free_gb:.2f} GB free of {place.total_gb:.2f} GB"


def _gpu_memory(env: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each of the job's GPUs whose memory is in use, and whether training would not fit."""
    allocated = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS")
    if not allocated:
        return
    from hpcinit.jobs import node_probe  # noqa: PLC0415

    gpus, wanted = node_probe.query_nvidia_smi(), allocated.split(",")
    if len(gpus) > len(wanted):  # without ConstrainDevices, nvidia-smi also lists GPUs of other jobs
        gpus = tuple(gpu for index, gpu in enumerate(gpus) if str(index) in wanted)
    for gpu in gpus:
        others = [(one, owner) for one in gpu.processes if (owner := _job_or_user(one.pid)) != env[JOB]]
        used = sum(one.used_mb or 0 for one, _ in others)
        total = gpu.total_mb or 0
        if used > MUCH_MB:
            names = ", ".join(f"{one.name} (process {one.pid}, {who})" for one, who in others)
            line = f"{used / 1024:.1f} of {total / 1024:.1f} GiB of {gpu.uuid} are in use by {names}"
            yield line, used > OCCUPIED * total > 0 and not any(env.get(name) for name in SHARING)
        elif not gpu.processes and (gpu.used_mb or 0) > MUCH_MB:
            yield f"{_gpu_memory_used(gpu)} are in use, but nvidia-smi lists no process", False


def _gpu_memory_used(gpu: Gpu) -> str:
    return f"{(gpu.used_mb or 0) / 1024:.1f} of {(gpu.total_mb or 0) / 1024:.1f} GiB of {gpu.uuid}"


def _job_or_user(pid: int) -> str:
    """Return the job of a process, or its user if the job is not readable."""
    with suppress(OSError):
        found = re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
        if found:
            return found[1].decode(errors="replace")
    try:
        return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    except OSError:
        return "user unknown"
    except KeyError:
        return "another user"
