"""Reads how ranks ended, from the messages of torchrun, accelerate, DeepSpeed, mpirun and Lightning."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence

from hpcinit.records import job_log
from hpcinit.records.job_log import End
from hpcinit.why.evidence import LAUNCHER, NO_RANK
from hpcinit.why.log_lines import Line
from hpcinit.why.read_tracebacks import TRAINS, Error

# The table of torchrun's ChildFailedError.
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode)\s*: (\S+)(?: \(local_rank: (\d+)\))?(?:.*\(pid: (\d+)\))?")
_NUMBER = re.compile(r"-?\d{1,6}")
# Printed by torchrun's agent, which sends a signal only to processes that have not ended yet.
_SIGNALED = re.compile(
    r"Unable to shutdown process (\d+) via \S+, forcefully exiting|Sending process (\d+) closing signal"
)
ENDED_BY_AGENT = ("Terminated", "Killed")  # the agent sends SIGTERM, then SIGKILL if a rank has not ended
_ROOT = "Root Cause (first observed failure):"
# Errors of launchers, which report that a rank failed, or that the launcher on another node ended.
_LAUNCHER = re.compile(
    r"ChildFailedError|CalledProcessError|ActorDiedError|RayActorError|WorkerCrashedError|RendezvousClosedError"
    r"|ProcessExitedException: process \d+ terminated with exit|processes exited with non-zero status"
    r"|'NoneType' object has no attribute 'is_failed'"
)
_OF_LAUNCHER = re.compile(
    r'File "[^"]*(?:bin/(?:torchrun|accelerate|accelerate-launch|deepspeed)|accelerate/commands/launch\.py'
    r"|deepspeed/launcher/\w+\.py|torch/distributed/(?:run\.py|launch\.py|launcher/|elastic/(?:agent|rendezvous)/))"
)
# Messages of torchrun's agent: how a local rank ended, the agent's global ranks, and whether there are several nodes.
_OF_AGENT = re.compile(r"failed \(exitcode: (-?\d{1,3})\) local_rank: (\d{1,6}) \(pid: (\d+)\)")
_GLOBAL = re.compile(r"\bglobal_ranks=\[([\d, ]+)\]")
_OF_NODES = re.compile(
    r"\b(?:nnodes|num_machines|group_world_size)[=: ]{1,2}(?!1\b)\d|\b(?:node_rank|machine_rank)[=: ]{1,2}[1-9]"
)
# Messages of DeepSpeed's launcher. Its error shows the command of its last rank, even if another rank failed.
_SPAWNED = re.compile(r"process (\d{1,9}) spawned with command: .*'--local_rank=(\d{1,6})'")
_NODES = re.compile(r"\[launch\.py:.*\bnnodes=(?!1\b)\d+")
_SUCCEEDED = re.compile(r"Process (\d+) exits successfully\.")
_RETURNED = re.compile(r"\[launch\.py:.*exits with return code = (-?\d{1,3})(?!\d)")
# bash, the agent of torchrun, subprocess in other launchers, and Lightning report a signal.
_SIGNALS = tuple(
    re.compile(pattern)
    for pattern in (
        r"^\S+: line \d+: +\d+ (?P<name>Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Terminated)\b"
        r"(?! +(?:nvidia-smi|rocm-smi|tail|tee|sleep|top|vmstat|iostat)\b)",  # a monitor that the script started
        r"died with <Signals\.SIG\w+: (?P<signal>\d{1,2})>",
        r"Child process with PID \d+ terminated with code -(?P<signal>\d{1,2})\b",
        r"KILLED BY SIGNAL: (?P<signal>\d{1,2})\b",
        r"\) terminated with signal (?P<signal>\d{1,2})\b",  # IBM's jsrun
        r"EXIT STRING: .* \(signal (?P<signal>\d{1,2})\)",
        r"Fatal Python error: (?P<name>Segmentation fault|Bus error|Aborted)",
        r"\bSignal: (?P<name>Segmentation fault|Bus error|Aborted) \(\d+\)",
    )
)
# Intel MPI: 'RANK 3 PID 4242 RUNNING AT n1', then 'KILLED BY SIGNAL: 9 (Killed)'
_MPI_RANK = re.compile(r"(?:\bRANK (\d{1,6}) )?\bPID \d+ RUNNING AT (\S+)")
_FIRST_NOTICED = re.compile(r"\(first noticed rank (\d{1,6})\)")
# How launchers report the end of a rank: mpirun, Cray's mpiexec, horovodrun, Paddle, Composer, torch.multiprocessing
_END = re.compile(
    r"(?:^(?P<host>[\w.-]+): )?\b(?:[Rr]ank (?P<rank>\d{1,6})|[Pp]rocess (?P<process>\d{1,3}))\b"
    r"(?:.{0,20} on node (?P<node>\S+))?.{0,20}\b(?:exit(?:ed)?|crashed|died|terminated|failed)\b.*?"
    r"\b(?P<what>signal|code|status) (?P<number>-?\d{1,3})\b"
)
# MPI_Abort of Open MPI and MPICH
_MPI_ABORT = re.compile(r"(?:MPI_ABORT was invoked on rank|\(rank) (\d{1,6}) in comm\w*(?:.*?exit code (-?\d{1,3}))?")
# How the rank in the line's prefix ended: a message of Lightning, or 'rank 5: exit code 1'
_CHILD = re.compile(
    r"(?:Child process with PID \d+ terminated with code|^exit(?:ed|ing)?\b.{0,20}\b(?:code|status)) (-?\d{1,3})\b"
)
_MPI_NAME = re.compile(r"^\s*Process name: \[\[\d+,\d+\],(\d{1,6})\]")
_MPI_CODE = re.compile(r"^\s*Exit code:\s+(\d{1,3})$")
# Printed by pdsh. The status 255 is of ssh itself.
_SSH = re.compile(r"^pdsh@\S+: (\S+): ssh exited with exit code 255$")
# A fast filter: only lines with one of these texts can match the patterns above, and a long log has few such lines.
_WORDS = re.compile(
    r"[Ee]xit|EXIT|[Ss]ignal|SIG|[Tt]erminat|[Kk]illed|KILLED|[Cc]rash|died|[Aa]bort|ABORT|CANCEL|fail|nnodes|spawned|noticed"
    r"|RUNNING AT|[Ff]ault|Bus error|Illegal|Process name|code|global_ranks|group_world_size|num_machines|node_rank"
)
_REFUSED_STEP = re.compile(r"srun: error: (Unable to create step for job \d+: (?!Job/step already complet).*)")
_RECEIVED = "Received SIGTERM: 15"  # printed by Lightning's handler, which then waits in a collective


def is_of_launcher(error: Error) -> bool:
    return is_report(error) or bool(_OF_LAUNCHER.search(error.traceback))


def is_report(error: Error) -> bool:
    """Return whether the error is only a launcher's report that something else failed."""
    return bool(_LAUNCHER.search(error.text))


def is_end(text: str) -> bool:
    """Return whether a launcher reports in this line how a rank ended."""
    return any(pattern.search(text) for pattern in (*_SIGNALS, _END, _OF_AGENT, _RETURNED, _MPI_ABORT))


def unreachable(lines: Sequence[Line]) -> Iterator[Error]:
    """Yield an error for each host that pdsh could not reach, with the message that ssh printed before."""
    for number, line in enumerate(lines):
        if found := _SSH.match(line.text):
            own = [one.text for one in lines[:number] if one.stream.startswith(f"{found[1]}:")]
            text = f"ssh probably could not connect to {found[1]}, or lost the connection"
            yield Error(LAUNCHER, ": ".join([text, *own[-1:]]), "", number, host=found[1])


def refused_step(lines: Sequence[Line], errors: Sequence[Error]) -> Iterator[Error]:
    """Yield an error for the first step that Slurm refused, if it was before all errors and no rank trained afterwards.

    For example, the refused step should have started the head of the Ray cluster that the program needs.
    """
    first = min((one.number for one in errors), default=0)
    for number, line in enumerate(lines[:first]):
        if found := _REFUSED_STEP.match(line.text):
            if not any(TRAINS.search(later.text) for later in lines[number:]):
                yield Error(LAUNCHER, found[1], "", number)
            return


def table(lines: Sequence[Line]) -> list[tuple[str, bool, End]]:
    """Return how ranks ended, according to the tables that torchrun prints on every node.

    Each item is a tuple: the time, False if torchrun lists the rank as the first failure, and how the rank ended.
    """
    ends: list[tuple[str, bool, End]] = []
    fields: dict[str, str] = {}
    root = False
    signaled = {found[1] or found[2] for line in lines if (found := _SIGNALED.search(line.text))}
    for line in lines:
        root = root or line.text.startswith(_ROOT)
        if found := _FIELD.match(line.text):
            fields[found[1]] = found[2]
            complete = found[1] == "exitcode" and {"host", "rank"} <= fields.keys()
            if complete and _NUMBER.fullmatch(fields["exitcode"]) and _NUMBER.fullmatch(fields["rank"]):
                how = job_log.how(int(fields["exitcode"]))
                by_agent = (how == "Terminated" and not root) or (how in ENDED_BY_AGENT and found[4] in signaled)
                ends.append(
                    (fields.get("time", ""), not root, End(fields["host"], (int(fields["rank"]),), how, by_agent))
                )
                fields = {}
        elif line.text.startswith("====="):
            root = False
    return ends


def about_ends(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that may report how a rank ended."""
    return [line for line in lines if _WORDS.search(line.text)]


def ends(
    lines: Sequence[Line],
    with_error: Collection[int],
    *,
    listed: bool,
    processes: Mapping[str, int],
    one_node: bool,
) -> list[End]:
    """Return how ranks ended, according to launchers' messages other than the lists of srun and torchrun.

    lines: what about_ends() returned.
    with_error: the ranks that printed an error.
    listed: whether srun or torchrun already list how ranks ended.
    processes: for each process ID, its rank.
    one_node: whether no log shows that there are several nodes.
    """
    known = [*_received_sigterm(lines), *_of_deepspeed(lines, with_error), *_by_rank(lines)]
    known += [] if listed else _of_agents(lines, processes, one_node=one_node)
    return known if known or listed else _without_rank(lines)


def _of_agents(lines: Sequence[Line], processes: Mapping[str, int], *, one_node: bool) -> Iterator[End]:
    """Yield how ranks ended, from the lines in which torchrun's agents report the end of a local rank.

    If the global rank is unknown, only a death by a signal counts.
    """
    ranks: dict[str, list[int]] = {}
    several = not one_node or any(_OF_NODES.search(line.text) for line in lines)
    for line in lines:
        if found := _GLOBAL.search(line.text):
            ranks[line.stream] = [int(each) for each in re.findall(r"\d{1,6}", found[1])]
        elif found := _OF_AGENT.search(line.text):
            local_rank, own = int(found[2]), ranks.get(line.stream, [])
            rank = own[local_rank] if local_rank < len(own) else NO_RANK if several or own else local_rank
            rank, how = processes.get(found[3], rank), job_log.how(int(found[1]))
            if rank != NO_RANK or int(found[1]) < 0:
                yield End("", (rank,) if rank != NO_RANK else (), how, how == "Terminated")


def _without_rank(lines: Sequence[Line]) -> list[End]:
    """Return the first death by a signal that a launcher or shell reports without a rank, or []."""
    rank, host = NO_RANK, ""
    for line in lines:
        if found := _FIRST_NOTICED.search(line.text):
            rank = int(found[1])
        if found := _MPI_RANK.search(line.text):
            rank, host = int(found[1] or NO_RANK), found[2]
        elif found := next((match for each in _SIGNALS if (match := each.search(line.text))), None):
            known = found.groupdict()
            how = known.get("name") or job_log.how(-int(known["signal"]))
            rank = line.rank if rank == NO_RANK else rank
            return [End(host, (rank,) if rank != NO_RANK else (), how, False)]
    return []


def _received_sigterm(lines: Sequence[Line]) -> list[End]:
    """Return the ranks for which Lightning reports a SIGTERM before Slurm ended the step."""
    ranks: dict[int, None] = {}
    for line in lines:
        if job_log.ABORTED.search(line.text):
            break
        if line.text.startswith(_RECEIVED) and line.rank != NO_RANK:
            ranks[line.rank] = None
    return [End("", (rank,), job_log.how(-signal.SIGTERM), False) for rank in ranks]


def _of_deepspeed(lines: Sequence[Line], with_error: Collection[int]) -> list[End]:
    """Return how ranks ended, according to DeepSpeed's launcher on one node.

    The launcher does not name the failed rank. If all ranks but one succeeded or printed an error, that one has
    failed. Otherwise, the failed rank is unknown.
    """
    several = any(_NODES.search(line.text) for line in lines)  # on several nodes, local ranks are not global ranks
    spawned = {found[1]: int(found[2]) for line in lines if not several and (found := _SPAWNED.search(line.text))}
    done = {spawned[found[1]] for line in lines if (found := _SUCCEEDED.search(line.text)) and found[1] in spawned}
    ended = [End("", (rank,), job_log.SUCCEEDED, False) for rank in sorted(done)]
    code = next((int(match[1]) for line in lines if (match := _RETURNED.search(line.text))), 0)
    if code < 0 or (code > 0 and not with_error):
        left = set(spawned.values()) - done - set(with_error)
        ended.append(End("", tuple(left) if len(left) == 1 else (), job_log.how(code), False))
    return ended


def _by_rank(lines: Sequence[Line]) -> Iterator[End]:
    rank = NO_RANK
    for line in lines:
        if found := _END.search(line.text):
            code = int(found["number"]) * (-1 if found["what"] == "signal" else 1)
            ranks = (int(found["rank"] or found["process"]),)
            yield End(found["node"] or found["host"] or "", ranks, job_log.how(code), False)
        elif line.rank != NO_RANK and (found := _CHILD.search(line.text)):
            yield End("", (line.rank,), job_log.how(int(found[1])), False)
        elif found := _MPI_ABORT.search(line.text):
            yield End("", (int(found[1]),), job_log.how(int(found[2] or 1)), False)
        elif found := _MPI_NAME.match(line.text):
            rank = int(found[1])
        elif rank != NO_RANK and (found := _MPI_CODE.match(line.text)):
            yield End("", (rank,), job_log.how(int(found[1])), False)
