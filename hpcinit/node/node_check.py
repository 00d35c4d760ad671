"""Checks this node before its ranks start, and prints the problems that it finds.

start() forks a process that does the checks while the rank itself starts. finish() prints the results. With
action=replace, it raises an error if ranks should not start on this node. If the check crashes or hangs (because of a
dead file server, or a driver that does not reply), the ranks start without it. The check only reads and prints: it ends
no process and removes no file.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcinit.base import failure_kinds, processes, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError
from hpcinit.engine import from_environment
from hpcinit.records import requeues, run_folder
from hpcinit.records.check_results import OK
from hpcinit.records.spec import OFF, REPLACE, Spec
from hpcinit.slurm import nodelist
from hpcinit.world.launchers import slurm_step

if TYPE_CHECKING:
    from hpcinit.records.node_facts import Nccl

JOB, NODE = "SLURM_JOB_ID", "SLURMD_NODENAME"
NEEDED = (JOB, NODE, "SLURM_CLUSTER_NAME", "SLURM_PROCID")
KILL_S = 1.0  # how long to wait for a killed process. If it takes longer, it hangs in the kernel
MOST_COMPARED = 64  # records of other nodes that the first node reads


@dataclass(frozen=True)
class Running:
    """A check that is running.

    pid: its process.
    pipe: the pipe to which the process writes the result.
    until: its deadline, as time.monotonic().
    """

    pid: int
    pipe: int
    action: str
    timeout_s: float
    until: float


def start(spec: Spec, env: Mapping[str, str]) -> Running | None:
    """Start the check of this node in the background. Return None if it does not run.

    The check runs only in a Slurm job step, in the first task of each node, unless it is disabled. Call this before
    this process has imported torch or started a thread, because the check is a fork of this process.
    """
    wanted = spec.check_node
    if wanted.action == OFF or not all(env.get(name) for name in NEEDED) or env.get("SLURM_LOCALID") != "0":
        return None
    if not from_environment(env).uses_slurm or not slurm_step.slurm_step_of_this_process().step:
        return None
    try:
        (ours, theirs), parent = os.pipe(), os.getpid()
        pid = os.fork()
    except OSError:  # this user's limit of processes or open files is reached
        return None
    if pid == 0:
        with suppress(BaseException):
            processes.die_with_parent(parent)
            os.setpgid(0, 0)  # finish() kills this group, which includes nvidia-smi
            _send_answer(theirs, spec, env)
        os._exit(0)
    os.close(theirs)
    return Running(pid, ours, wanted.action, wanted.timeout_s, time.monotonic() + wanted.timeout_s)


def _send_answer(pipe: int, spec: Spec, env: Mapping[str, str]) -> None:
    """Run the checks and write the result to the pipe as JSON. This runs in the forked process."""
    try:
        lines, unusable = check(spec, env)
        answer = {"lines": lines, "unusable": unusable}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    with os.fdopen(pipe, "w") as file:
        json.dump(answer, file)


def finish(running: Running | None, folder: Path) -> None:
    """Print what the check found. Raise BringUpError if the ranks should not start on this node.

    folder: the run folder.
    """
    if running is None:
        return
    node, off = os.environ[NODE], "to disable the check: check_node.action=off"
    anyway = f"the ranks start without its result; {off}"
    text = _receive_answer(running)
    if text is None:
        if running.action == REPLACE:  # otherwise print nothing, because a slow node would print a line in every job
            say(f"{node}: the node check did not finish within {running.timeout_s:g} s; {anyway}")
        return
    found = json.loads(text) if text.endswith("}") else {"error": "it ended without an answer"}
    if "error" in found:
        say(f"{node}: the check of the node failed: {found['error']}; {anyway}")
        return
    for line in found["lines"]:
        say(f"{node}: {line}")
    if found["unusable"] and running.action == REPLACE:
        with suppress(OSError):  # hpcinit.after reads this record to replace the node
            requeues.record_unusable(folder, node, os.environ)
        raise BringUpError(
            f"{node} cannot be used: {found['unusable']}. Submit with +cluster.sbatch.exclude={node} or with "
            f"spare_nodes=1, and report the node to the site; {off}",
            kind=failure_kinds.NODE,
            host_at_fault=node,
        )


def _receive_answer(running: Running) -> str | None:
    """Wait until the check ends, and return what it wrote, or None if it takes too long. Kill and reap its process."""
    poll, found, ended = select.poll(), b"", False
    poll.register(running.pipe, select.POLLIN)
    while not ended and poll.poll(max(running.until - time.monotonic(), 0) * 1000):
        part = os.read(running.pipe, 65536)
        found, ended = found + part, not part
    os.close(running.pipe)
    for end in (os.killpg, os.kill):  # also by pid, because its group may not exist yet
        with suppress(ProcessLookupError):
            end(running.pid, signal.SIGKILL)  # our child, not yet reaped: it has answered, or its time is over
    with suppress(ChildProcessError):
        gone = time.monotonic() + KILL_S
        while os.waitpid(running.pid, os.WNOHANG) == (0, 0) and time.monotonic() < gone:
            time.sleep(0.01)  # the rank must not wait forever if the process hangs in the kernel
    return found.decode(errors="replace") if ended else None


def check(spec: Spec, env: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the lines to print, and the reason why ranks should not start on this node, or '' if they can."""
    from hpcinit.node import node_findings, node_probe  # noqa: PLC0415 - only the check's side needs them

    node = node_probe.probe(env, env[NODE], (), spec.comm.backend, spec.check_node.timeout_s)
    found = list(node_findings.node_findings(node, (), (), spec.world_size))
    if node.nccl:
        several = _of_other_nodes(node.nccl, env) if spec.nodes > 1 else []
        found += node_findings.nccl_alone(node.nccl, spec.nodes)
        found += node_findings.nccl_compared([node.nccl, *several])
    faults = [one for one in found if one.status != OK]
    lines = [f"{one.detail}; {one.advice}".removeprefix(f"{env[NODE]}: ") for one in faults]
    return lines, node_findings.unusable(node)


def _of_other_nodes(own: Nccl, env: Mapping[str, str]) -> list[Nccl]:
    """Record in the run folder which interface NCCL uses on this node, and return the records of other nodes.

    The first node reads all records. The other nodes read only the first node's record. Each node writes before it
    reads, so of the first node and any other one, at least one finds the other's record.
    """
    from hpcinit.records.node_facts import Nccl  # noqa: PLC0415

    folder = Path(env.get(run_folder.ENV_FOLDER) or ".") / run_folder.NCCL
    first = nodelist.expand(env.get("SLURM_STEP_NODELIST") or env[NODE])[0]
    attempt, found = requeues.attempt(env), []
    with suppress(OSError):
        safe_files.make_folders(folder)
        safe_files.write_atomically(folder / f"{attempt}.{env[NODE]}.json", json.dumps(asdict(own)))
        own_is_first = first == env[NODE]
        paths = list(folder.glob(f"{attempt}.*.json")) if own_is_first else [folder / f"{attempt}.{first}.json"]
        for path in sorted(paths)[:MOST_COMPARED]:
            if one := run_folder.read_record(Nccl, path):
                found.append(one)
    return [one for one in found if one.host != own.host]
