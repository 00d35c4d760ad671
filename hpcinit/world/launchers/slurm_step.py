"""Reads the world of ranks that srun started, one Slurm task per rank.

The local engine and launch=fork set the same variables.

- Right in all recorded launches (tests/data): SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, the length of SLURM_GTIDS, and
  SLURM_STEP_NUM_TASKS.
- Sometimes wrong: SLURM_NTASKS (srun --preserve-env), SLURM_NTASKS_PER_NODE, ntasks // nodes, and the first host of any
  list (see place_of_rank).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcinit.base import processes
from hpcinit.base.errors import NodelistError, RequestError, WorldError
from hpcinit.base.safe_files import read_or_empty
from hpcinit.base.text import counted
from hpcinit.records import elastic_restarts
from hpcinit.slurm import nodelist
from hpcinit.world import World, number, ports

NAME = "slurm"
VARIABLES: Mapping[str, str] = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
}
USE_SRUN = "start the ranks with srun, because sbatch and salloc alone start none"

# The kernel shows which Slurm step created this process. The environment does not: a batch script that was submitted
# from inside a step of the same shape has exactly the environment of a real rank 0 (tests/data/worlds:
# nested_same_shape). Only the slurmstepd process above the script differs.

# Slurm's cgroups, version 1 and 2: /slurm/uid_1000/job_43/step_0/task_1, .../slurmstepd.scope/job_43/step_batch/user.
_CGROUP = re.compile(r"/job_(\d+)/step_(\w+)")
# slurmstepd sets its process title to "slurmstepd: [43.0]" or "slurmstepd: [43.batch]".
_TITLE = re.compile(r"slurmstepd: \[(\d+)(?:\+\d+)?\.(\w+)")


@dataclass(frozen=True)
class Process:
    """This process, as Slurm started it.

    pid: its process id, or 0 if unknown.
    step: the Slurm step of the slurmstepd above this process, such as '43.0' or '43.batch', or '' if none is visible. A
        container or hidepid may hide it.
    """

    pid: int = 0
    step: str = ""


UNKNOWN = Process()


def slurm_step_of_this_process(proc: Path = processes.PROC) -> Process:
    """Return how Slurm started this process. Never raise: values that cannot be read stay empty."""
    titles = map(_TITLE.match, processes.command_lines(os.getpid(), proc))
    found = _CGROUP.search(read_or_empty(proc / "self/cgroup")) or next(filter(None, titles), None)
    return Process(os.getpid(), f"{found[1]}.{found[2]}" if found else "")


# The hosts of a Slurm step in the order of SLURM_NODEID, and rank 0's host.
#
# Slurm sorts SLURM_STEP_NODELIST. SLURM_NODEID is the index in it, except in a heterogeneous step, where it counts
# along the components. Rank 0 is on the first host, except with --distribution=arbitrary. In 22.05.8 and 24.11.5:
#
#     srun --het-group=0,1 of n4 and n[1-2]     list n[1-2,4]   SLURM_NODEID n4 n1 n2   rank 0 n4
#     srun -m arbitrary, hosts n3 n1 n3 n2      list n[1-3]     SLURM_NODEID n1 n2 n3   rank 0 n3
#     srun -w n3 : -w n1,n2 in a plain job      list n[1-3]     SLURM_NODEID n3 n1 n2   rank 0 n3, in no variable


@dataclass(frozen=True)
class Placement:
    """Which nodes the ranks run on.

    hosts: the nodes in the order of SLURM_NODEID.
    master: rank 0's host.
    known: whether master and the order of the hosts are certain.
    """

    hosts: tuple[str, ...]
    master: str
    known: bool = True


def place_of_rank(env: Mapping[str, str], node_rank: int, ranks_here: Sequence[int]) -> Placement:
    """Return which nodes the ranks run on, from the step's nodelist, its components and its host file.

    Raise WorldError if the nodelist is not set, or if it has no node with the number `node_rank`.
    """
    # SLURM_STEP_NODELIST is the step's list. SLURM_JOB_NODELIST stays the job's list, even in a step on a part of the
    # allocation (Slurm, env.c: env_array_for_step).
    text = env.get("SLURM_STEP_NODELIST")
    if not text:
        raise WorldError(f"SLURM_STEP_NODELIST is not set, expected the step's host names: {USE_SRUN}")
    hosts = by_component(env, nodelist.expand(text))
    own = env.get("SLURMD_NODENAME", "")
    if not node_rank < len(hosts):
        raise WorldError(
            f"SLURM_NODEID is {node_rank}, but the step has {counted(len(hosts), 'host')} "
            f"({','.join(hosts)}): {USE_SRUN}"
        )
    if env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        master = _of_hostfile(env, hosts, own, ranks_here)
        return Placement(hosts, master) if master else _without_order(hosts, own or hosts[node_rank], ranks_here)
    if own and own in hosts and hosts[node_rank] != own:
        return _without_order(_moved(hosts, own, node_rank), own, ranks_here)
    if (0 in ranks_here) != (node_rank == 0):
        return _without_order(hosts, own or hosts[node_rank], ranks_here)
    return Placement(hosts, hosts[0])


def by_component(env: Mapping[str, str], listed: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts in the order of the heterogeneous job's components. For other jobs, return them as listed."""
    ordered = [host for group in components(env) for host in group if host in set(listed)]
    return tuple(ordered if len(ordered) == len(listed) else listed)


def components(env: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each component of a heterogeneous job, or [] for an ordinary job."""
    # Variables of another job can be inherited: the first component's id is the job's own id.
    if env.get("SLURM_JOB_ID_HET_GROUP_0") != env.get("SLURM_JOB_ID") or "SLURM_JOB_ID" not in env:
        return []
    size = env.get("SLURM_HET_SIZE", "0")
    lists = [env.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in range(int(size) if size.isdigit() else 0)]
    return [nodelist.expand(text) for text in lists] if all(lists) else []


def _of_hostfile(env: Mapping[str, str], hosts: Sequence[str], own: str, ranks_here: Sequence[int]) -> str:
    """Return the first host of SLURM_HOSTFILE if that file exists and placed this step, else ''."""
    try:
        lines = Path(env["SLURM_HOSTFILE"]).read_text(encoding="utf-8").splitlines()
        names = [name for line in lines for word in line.partition("#")[0].split() for name in _repeated(word)]
    except (KeyError, OSError, UnicodeDecodeError, NodelistError):
        return ""
    if set(names) != set(hosts) or max(ranks_here) >= len(names):
        return ""  # srun -w HOSTS overrides the file, or the file has changed since
    return names[0] if all(names[rank] == own for rank in ranks_here) else ""


def _repeated(word: str) -> list[str]:
    """Return the hosts of one entry in a host file, such as [n1, n2] for 'n[1-2]', and [n1, n1, n1] for 'n1*3'."""
    names, _, times = word.partition("*")
    return nodelist.expand(names) * (int(times) if times.isdigit() and len(times) < 6 else 1)


def _without_order(hosts: tuple[str, ...], own: str, ranks_here: Sequence[int]) -> Placement:
    """Return the placement for a step whose order of hosts is unknown.

    Rank 0's host is certain if rank 0 is on this node, or if there are at most two hosts. If not, guess it.
    """
    others = [host for host in hosts if host != own]
    master = own if 0 in ranks_here else (others or hosts)[0]
    return Placement(hosts, master, known=len(hosts) <= 2)


def _moved(hosts: tuple[str, ...], own: str, to: int) -> tuple[str, ...]:
    """Return the hosts after swapping `own` with the host at index `to`."""
    swapped = list(hosts)
    at = swapped.index(own)
    swapped[at], swapped[to] = swapped[to], swapped[at]
    return tuple(swapped)


# Is this process really a task of the step that its environment describes?
#
# A batch script has SLURM_PROCID=0, so it looks like rank 0. A job that was submitted from inside a step inherits the
# step's variables. Measured on Slurm 22.05.8, 24.11.5 (tests/data/slurm, tests/data/worlds) and 26.05.5:
#
#     evidence                                            detects
#     no SLURM_STEP_ID                                    sbatch and salloc from a login node
#     SLURM_STEP_ID 4294967290                            salloc's interactive shell
#     another slurmstepd above this process               all of them, if /proc can be read
#
# If /proc shows no slurmstepd, as in some containers, a nested job counts as a step. Its ranks then wait for the others
# until the start-up timeout, and rank 0 prints which ranks are missing.

# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT. Slurm 26.05 writes them as signed numbers.
NO_RANKS = {
    "-6": "an interactive shell of salloc",
    "-5": "a batch script",
    "-4": "a login to the node",
    "4294967290": "an interactive shell of salloc",
    "4294967291": "a batch script",
    "4294967292": "a login to the node",
    "interactive": "an interactive shell of salloc",
    "batch": "a batch script",
    "extern": "a login to the node",
}


def doubt_about_step(env: Mapping[str, str], process: Process) -> str:
    """Return why this process is probably not a task of a Slurm step, as a clause of a message, or ''."""
    step = env.get("SLURM_STEP_ID")
    if step is None:
        return "SLURM_STEP_ID is not set"
    if step in NO_RANKS:
        return f"SLURM_STEP_ID is {step}: {NO_RANKS[step]}"
    # Slurm always sets SLURM_TASK_PID. hpcinit's local engine does not, and the engine may run inside a step.
    return _doubt_from_process(env, process) if process.step and "SLURM_TASK_PID" in env else ""


def job_ids(env: Mapping[str, str]) -> set[str]:
    """Return the ids of the job and of all its components. slurmstepd treats each component as a job."""
    names = ("SLURM_JOB_ID", "SLURM_JOBID")
    return {env[k] for k in env if k in names or k.startswith("SLURM_JOB_ID_HET_GROUP_")}


def _doubt_from_process(env: Mapping[str, str], process: Process) -> str:
    job, _, step = process.step.partition(".")
    if job in job_ids(env) and step == env["SLURM_STEP_ID"]:
        return ""
    claimed = f"{env.get('SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    what = f", {NO_RANKS[step]}," if step in NO_RANKS else ""
    return f"SLURM_STEP_ID is inherited: Slurm started this process in step {process.step}{what} not in {claimed}"


def present(env: Mapping[str, str]) -> bool:
    """Return whether this process is in a Slurm task, a batch script or a salloc shell.

    Some of Slurm's variables may still be missing. read() reports the missing ones.
    """
    return "SLURM_JOB_ID" in env or "SLURM_JOBID" in env


def read(env: Mapping[str, str], process: Process = UNKNOWN) -> World:
    """Return the world of a Slurm step, or of a job with one task. In any other case, raise WorldError."""
    if not (env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        raise WorldError(
            f"SLURM_JOB_ID is not set, expected a job id, which Slurm sets for every task: {USE_SRUN} (or do not set "
            "HPCINIT_STARTED_BY=slurm)"
        )
    doubt = doubt_about_step(env, process)
    if doubt:
        return _without_step(env, doubt)
    rank = number(env, "SLURM_PROCID", USE_SRUN)
    local_rank = number(env, "SLURM_LOCALID", USE_SRUN)
    node_rank = number(env, "SLURM_NODEID", USE_SRUN)
    ranks_here = _ranks_here(env, rank, local_rank)
    placement = place_of_rank(env, node_rank, ranks_here)
    job = identity(env)
    return World(
        launcher=NAME,
        rank=rank,
        # SLURM_NTASKS keeps the job's value under srun --preserve-env.
        world_size=number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS", USE_SRUN),
        local_rank=local_rank,
        local_world_size=len(ranks_here),
        node_rank=node_rank,
        hosts=placement.hosts,
        master_addr=placement.master,
        master_ports=ports.candidate_ports(job),
        job=job,
        master_known=placement.known,
        ranks_here=tuple(ranks_here),
    )


def identity(env: Mapping[str, str]) -> str:
    """Return the unique name of this attempt: 'JOB.STEP.RESTART', or 'JOB.STEPe1.RESTART' after a warm restart.

    A requeued job keeps its id, so the name includes the restart count. In a heterogeneous job, each component counts
    its own steps, so a step without the first component is named 'JOB+COMPONENT.STEP.RESTART'.
    """
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID", "0")
    step = set(nodelist.expand(env["SLURM_STEP_NODELIST"])) if env.get("SLURM_STEP_NODELIST") else set()
    first = next((i for i, hosts in enumerate(components(env)) if step & set(hosts)), 0)
    component = f"+{first}" if first else ""
    step_name = f"{job}{component}.{env.get('SLURM_STEP_ID', '0')}.{env.get('SLURM_RESTART_COUNT', '0')}"
    warm = elastic_restarts.ENV_ROUND
    return elastic_restarts.round_folder(step_name, number(env, warm, "unset it") if warm in env else 0)


def starts_this_very_process(env: Mapping[str, str], process: Process) -> bool:
    """Return whether slurmstepd started this process directly, without another launcher in between."""
    return process.pid != 0 and env.get("SLURM_TASK_PID") == str(process.pid) and not doubt_about_step(env, process)


def _ranks_here(env: Mapping[str, str], rank: int, local_rank: int) -> list[int]:
    """Return this node's ranks, from SLURM_GTIDS ('4,5,6'). Nodes may differ: srun -N4 -n8 gives 5, 1, 1, 1 ranks."""
    text = env.get("SLURM_GTIDS", "")
    words = text.split(",")
    found = words[local_rank] if 0 <= local_rank < len(words) else "absent"
    if found != str(rank) or not all(word.isdigit() for word in words):
        raise WorldError(
            f"Slurm's variables are from different steps: SLURM_GTIDS is {text!r}, so local rank {local_rank} should "
            f"be rank {found}, but SLURM_PROCID is {rank}; start the ranks with srun from the batch script"
        )
    return [int(word) for word in words]


def _without_step(env: Mapping[str, str], doubt: str) -> World:
    """Return the world of a batch script or salloc shell whose job has one task.

    Raise WorldError if the job has more tasks, because this process would wait for them and hang.
    """
    tasks = _tasks_of_job(env)
    if tasks != "1 task":
        raise WorldError(
            f"this process has no rank ({doubt}), but the job has {tasks}: {USE_SRUN}. For a single process, set "
            "HPCINIT_STARTED_BY=single"
        )
    job = f"{env.get('SLURM_JOB_ID') or env.get('SLURM_JOBID')}.batch.{env.get('SLURM_RESTART_COUNT', '0')}"
    host = env.get("SLURMD_NODENAME", "")
    return World(NAME, 0, 1, 0, 1, 0, (host,) if host else (), "127.0.0.1", ports.candidate_ports(job), job)


def _tasks_of_job(env: Mapping[str, str]) -> str:
    """Return the size of the job as text: '8 tasks', or '2 nodes' if only nodes were requested.

    For a heterogeneous job, return the sum of all components.
    """
    counts = [env.get(f"SLURM_NTASKS_HET_GROUP_{i}", "1") for i in range(len(components(env)))]
    if counts and all(count.isdigit() for count in counts):
        return counted(sum(map(int, counts)), "task")
    nodes, tasks = env.get("SLURM_JOB_NUM_NODES", "1"), env.get("SLURM_NTASKS", "1")
    return f"{nodes} nodes" if tasks == "1" != nodes else f"{tasks} task{'s' * (tasks != '1')}"


# With launch=fork, the one Slurm task of a node forks its ranks.

ONE_TASK = "start one task per node: srun --ntasks-per-node=1, as the run folder's job.sh does"
# Variables that forked ranks do not inherit: MPI's process managers do not know these ranks, and the CPU and GPU
# bindings are those of the fork server. SLURM_UMASK stays, because it distinguishes a task from a batch script.
NOT_THEIRS = ("PMI_", "PMI2_", "PMIX_", "SLURM_CPU_BIND", "SLURM_GPU_BIND", "SLURMD_TRES_BIND", "SLURM_TRES_BIND")


@dataclass(frozen=True)
class ForkNode:
    """The task of launch=fork on this node, and the node's ranks.

    rank: the number of the node, 0 to nodes - 1, from SLURM_NODEID.
    host: Slurm's name of the node.
    hosts: the nodes with ranks, in the order of the ranks, if the step has spare nodes; else (). A spare node has
        ranks_per_node 0.
    """

    rank: int
    nodes: int
    ranks_per_node: int
    host: str
    hosts: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """Return the first rank on this node."""
        return self.rank * self.ranks_per_node


def fork_node(env: Mapping[str, str], nodes: int, ranks_per_node: int, spares: int = 0) -> ForkNode:
    """Return which node this task runs on, and its ranks.

    spares: how many tasks the step may have on spare nodes, which are the last nodes of the step.

    Raise RequestError if the step does not have one task per node, or does not have the run's number of nodes.
    """
    tasks = number(env, "SLURM_STEP_NUM_TASKS", ONE_TASK)
    if not nodes <= tasks <= nodes + spares or env.get("SLURM_LOCALID") != "0":
        raise RequestError(
            f"the step has {tasks} tasks (SLURM_STEP_NUM_TASKS), and this process is task {env.get('SLURM_LOCALID')} "
            f"on its node (SLURM_LOCALID), but the run has {nodes} node{'s' * (nodes != 1)} x {ranks_per_node} ranks: "
            f"{ONE_TASK}"
        )
    rank = number(env, "SLURM_NODEID", ONE_TASK)
    hosts = tuple(nodelist.expand(env.get("SLURM_STEP_NODELIST", ""))[:nodes]) if spares else ()
    return ForkNode(rank, nodes, ranks_per_node if rank < nodes else 0, env.get("SLURMD_NODENAME", ""), hosts)


def fork_environment(
    env: Mapping[str, str], here: ForkNode, local_rank: int, pid: int, cpus: int | None
) -> dict[str, str]:
    """Return the whole environment for a forked rank: its parent's, plus the variables that srun would have set.

    Ranks are numbered node by node, even if Slurm numbers tasks in another order. tests/test_fork.py compares the
    environments of srun's tasks and of forked ranks.
    """
    per_node, world = str(here.ranks_per_node), str(here.nodes * here.ranks_per_node)
    counts = per_node if here.nodes == 1 else f"{per_node}(x{here.nodes})"
    found = {name: value for name, value in env.items() if not name.startswith(NOT_THEIRS)}
    found |= {
        "SLURM_PROCID": str(here.first + local_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_GTIDS": ",".join(str(here.first + other) for other in range(here.ranks_per_node)),
        "SLURM_DISTRIBUTION": "block",
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), world),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts),
    }
    if here.hosts:
        count = str(here.nodes)
        found |= {"SLURM_STEP_NODELIST": ",".join(here.hosts), "SLURM_NODEID": str(here.rank)}
        found |= dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), count)
    if "SLURM_NTASKS_PER_NODE" in env:
        found["SLURM_NTASKS_PER_NODE"] = per_node
    if "SLURM_TASK_PID" in env:  # not set by the local engine
        found["SLURM_TASK_PID"] = str(pid)
    if "SLURM_CPUS_PER_TASK" in env and cpus is not None:
        found["SLURM_CPUS_PER_TASK"] = str(cpus)
        if env.get("SLURM_TRES_PER_TASK", "").startswith("cpu="):  # since Slurm 24.05
            found["SLURM_TRES_PER_TASK"] = f"cpu={cpus}"
    return found
