"""A job that hpcinit did not submit: what Slurm reports about it, and the evidence in its logs.

The logs are of srun, torchrun, accelerate, DeepSpeed or Lightning. The lines of a rank are recognized by their prefix
('3: ' of `srun -l`, '[rank3]:' of torch, '[default3]:' of torchrun, '[rank: 3]' of Lightning) or by the name of their
file. torchrun's table of failures has rank, host and exit status. A task of srun can be a torchrun agent, and
'[default1]:' is a local rank; both then name no rank.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from hpcinit.records import causes, job_log, run_folder
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.job_log import End, JobLog
from hpcinit.slurm import scontrol, slurm_client
from hpcinit.why import flight_recorder, hang_verdict, large_logs
from hpcinit.why.evidence import LAUNCHER, NO_RANK, Evidence

NAMES = ("*.out", "*.err", "*.log", "*.txt", "log*", "*stderr*", "*stdout*")
MOST_FILES = 1024  # of one folder
MOST_BYTES = 256 << 20  # of all files that are read completely
_SRUN = re.compile(r"^ *(\d{1,6}): ?")  # srun -l
_RANK = re.compile(r"^\[rank(\d{1,6})\]: ?")
_LIGHTNING = re.compile(r"^\[rank: (\d{1,6})\] ?")  # the local rank under srun
_RECEIVED = "Received SIGTERM: 15"  # printed by Lightning's handler, which then waits in a collective
_HANDLER = "trainer/connectors/signal_connector.py"
_LOCAL = re.compile(r"^\[default(\d{1,6})\]:")  # torchrun --tee
_TEE = re.compile(r"^(?: *\d+: ?)?\[default\d+\]:", re.MULTILINE)
_FILE = re.compile(
    r"(?:^|[^0-9a-z])(?:rank|task|proc)[_-]?(\d{1,6})(?!\d)|^\d+[_-](\d{1,6})\.(?:out|err|log)$", re.IGNORECASE
)
_FOLDER = re.compile(r"attempt_\d+/(\d{1,6})/std(?:err|out)\.log$")  # torchrun --log-dir, by local rank
_BEGIN = "Traceback (most recent call last):"
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_WATCHDOG = re.compile(r"\[Rank (\d{1,6})\].*(Watchdog caught collective operation timeout.*)")
_XID = re.compile(r"(NVRM: Xid .*)")
# Not of a checkpoint: 'saved with world_size=10'.
_SIZE = re.compile(
    r"^(?!.*(?:saved|checkpoint|loaded|resum)).*?\b(?:dist_)?world[_ ]size\b['\"]?\s*[:=]?\s*(\d{1,6})(?!\d)",
    re.IGNORECASE | re.MULTILINE,
)
# The table of torchrun's ChildFailedError.
_FIELD = re.compile(r"^\s*(time|host|rank|exitcode)\s*: (\S+)(?: \(local_rank: (\d+)\))?(?:.*\(pid: (\d+)\))?")
_NUMBER = re.compile(r"-?\d{1,6}")
_FORCED = re.compile(r"Unable to shutdown process (\d+) via \S+, forcefully exiting")  # by the agent, after SIGTERM
_ROOT = "Root Cause (first observed failure):"
_AGENT = "torch/distributed/elastic/"  # in the agent's messages and tracebacks
# Errors of launchers, which report that a rank failed, or that the launcher on another node ended.
_LAUNCHER = re.compile(
    r"ChildFailedError|CalledProcessError|'NoneType' object has no attribute 'is_failed'|RendezvousClosedError"
)
_OF_LAUNCHER = re.compile(
    r'File "[^"]*(?:bin/(?:torchrun|accelerate|accelerate-launch|deepspeed)|accelerate/commands/launch\.py'
    r"|deepspeed/launcher/\w+\.py|torch/distributed/(?:run\.py|launch\.py|launcher/|elastic/(?:agent|rendezvous)/))"
)
# DeepSpeed's launcher. Its error has the command of its last rank, whichever rank failed.
_SPAWNED = re.compile(r"process (\d{1,9}) spawned with command: .*'--local_rank=(\d{1,6})'")
_NODES = re.compile(r"\[launch\.py:.*\bnnodes=(?!1\b)\d+")
_SUCCEEDED = re.compile(r"Process (\d+) exits successfully\.")
_RETURNED = re.compile(r"\[launch\.py:.*exits with return code = (-?\d{1,3})(?!\d)")
WORKER_GONE = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
ENDED_BY_SLURM = {"CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"}
WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal")


@dataclass(frozen=True)
class Log:
    """text: of a file. rank: whose file it is, None if several ranks write to it. written: its modification time.
    skipped: the number of bytes that are not in the text."""

    text: str
    rank: int | None = None
    written: float = 0.0
    skipped: int = 0


@dataclass(frozen=True)
class Foreign:
    """evidence: what the logs show. unknown: what they do not show, with the line that would have shown it."""

    evidence: Evidence
    unknown: tuple[str, ...] = ()


def files(place: Path) -> list[Path]:
    """Return the log files at `place`, a file or a folder."""
    if place.is_file():
        return [place]
    found = {path for name in NAMES for path in place.rglob(name) if path.is_file()}
    return sorted(found)[:MOST_FILES]


def read(paths: Sequence[Path]) -> list[Log]:
    """Return the logs, the oldest first. Skip files that cannot be read."""
    found = []
    for path in paths:
        try:
            with path.open("rb") as file:
                text, skipped = large_logs.read(file, min(large_logs.WHOLE, MOST_BYTES // len(paths)))
            found.append(Log(text, _rank_of(path), path.stat().st_mtime, skipped))
        except OSError:
            continue
    return sorted(found, key=lambda log: log.written)


def _rank_of(path: Path) -> int | None:
    match = _FOLDER.search(str(path)) or _FILE.search(path.name)
    return int(next(group for group in match.groups() if group)) if match else None


def gather(
    logs: Sequence[Log],
    state: str = "",
    dumps: Mapping[int, Mapping[str, object]] | None = None,
    preempted_at: str = "",
) -> Foreign:
    """Return the evidence in the logs. state: of Slurm's job, '' if unknown. dumps: of torch's flight recorder.
    preempted_at: when Slurm preempted the job, '' if it did not."""
    errors: list[tuple[int, str, str]] = []  # rank, error, traceback
    table: list[tuple[str, bool, End]] = []
    received: list[End] = []
    seen: set[int] = set()
    size, job_lines = 0, []
    labels = _labels(logs)
    for log in logs:
        lines = list(_lines(log, labels))
        seen |= {rank for rank, _ in lines if rank != NO_RANK}
        errors += _errors(lines)
        received += _received_sigterm(lines)
        table += _table([line for _, line in lines])
        job_lines += [line for _, line in lines]
        size = max([size, *(int(found[1]) for found in _SIZE.finditer(log.text))])
    slurm = job_log.read("\n".join(job_lines))
    ends = [end for _, _, end in sorted(table, key=lambda one: one[:2])]
    of_ranks = labels.task and not ends  # srun's tasks are the agents of torchrun otherwise
    every_end = of_ranks and bool(slurm.ends)
    slurm = replace(slurm, ends=tuple([*slurm.ends] if of_ranks else ends), output=())
    if slurm.cancelled or preempted_at or state in ENDED_BY_SLURM:  # a worker that died of its SIGTERM
        errors = [one for one in errors if not WORKER_GONE.search(one[1])]
    of_launcher = [one for one in errors if _LAUNCHER.search(one[1]) or _OF_LAUNCHER.search(one[2])]
    errors = _assigned([one for one in errors if one not in of_launcher], slurm)
    by_deepspeed = _of_deepspeed(job_lines, {rank for rank, _, _ in errors if rank != NO_RANK})
    slurm = replace(slurm, ends=(*received, *by_deepspeed, *slurm.ends))
    if not errors and not slurm.ends:  # the launcher's own errors are secondary unless nothing else exists
        errors = [(LAUNCHER, *one[1:]) for one in sorted(of_launcher, key=lambda one: bool(_LAUNCHER.search(one[1])))]
    hosts = {rank: end.host for end in slurm.ends for rank in end.ranks if end.host}
    ranks = {*seen, *hosts, *(rank for rank, _, _ in errors if rank >= 0)}
    found = tuple(
        Found(ErrorRecord(float(number), rank, hosts.get(rank, ""), error, traceback), 0.0)
        for number, (rank, error, traceback) in enumerate(_first_of_each(errors))
    )
    evidence = Evidence(
        state or ("FAILED" if found or slurm.ends else "UNKNOWN"),
        found=found,
        log=job_log.with_preemption(slurm, preempted_at),
        size=max([size, *(rank + 1 for rank in ranks)]),
        hosts=hosts,
        tails=_tails(logs, labels),
        flight=hang_verdict.verdict(dumps or {}, hosts),
        every_end_is_logged=every_end or bool(ends),
        has_clock=False,
        lists_failed_ranks=bool(ends) and not size,
        preempted=bool(preempted_at),
    )
    skipped = sum(log.skipped for log in logs) >> 20
    unread = f"what {skipped} MB of the logs contain: hpcinit only searched them for messages of failures"
    return Foreign(evidence, (*_unknown(evidence, size), *([unread] if skipped else [])))


@dataclass(frozen=True)
class Labels:
    """Whether a task of srun, and a local rank of torchrun, is a rank."""

    task: bool
    local: bool


def _labels(logs: Sequence[Log]) -> Labels:
    agents = any(_AGENT in log.text or _TEE.search(log.text) for log in logs)
    fields = (found for log in logs for line in log.text.splitlines() if (found := _FIELD.match(_unlabelled(line))))
    return Labels(not agents, all(found[2] == found[3] for found in fields if found[1] == "rank"))


def _unlabelled(line: str) -> str:
    return _SRUN.sub("", line, count=1)


def _lines(log: Log, labels: Labels) -> Iterator[tuple[int, str]]:
    """Yield (rank, line without its prefixes)."""
    lines = log.text.splitlines()
    # srun and the user's shell print without a label.
    labelled = sum(1 for line in lines if _SRUN.match(line)) * 2 > sum(
        1 for line in lines if line.strip() and not job_log.is_from_slurm(line)
    )
    for line in lines:
        rank, rest = NO_RANK if log.rank is None else log.rank, line
        if labelled and (found := _SRUN.match(rest)):
            rank, rest = int(found[1]) if labels.task else rank, rest[found.end() :]
        if found := _LOCAL.match(rest):
            rank, rest = int(found[1]) if labels.local else rank, rest[found.end() :]
        if found := _RANK.match(rest):
            rank, rest = int(found[1]), rest[found.end() :]
        elif found := _LIGHTNING.match(rest):
            rank, rest = int(found[1]) if rank == NO_RANK else rank, rest[found.end() :]
        yield rank, rest


def _errors(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str, str]]:
    """Return (rank, error, traceback) of each traceback, of NCCL's watchdog and of the driver, in their order."""
    found: list[tuple[int, str, str]] = []
    open_tracebacks: dict[int, list[str]] = {}
    for rank, line in lines:
        if line.startswith(_BEGIN):
            open_tracebacks[rank] = [line]
        elif rank in open_tracebacks:
            open_tracebacks[rank].append(line)
            if _ERROR.match(line):
                traceback = "\n".join(open_tracebacks.pop(rank))
                if _HANDLER not in traceback:
                    found.append((rank, line, traceback))
        elif watchdog := _WATCHDOG.search(line):
            found.append((int(watchdog[1]), f"RuntimeError: [Rank {watchdog[1]}] {watchdog[2]}", ""))
        elif xid := _XID.search(line):
            found.append((rank, xid[1], ""))
    return found


def _received_sigterm(lines: Sequence[tuple[int, str]]) -> list[End]:
    """Return the ranks for which Lightning reports a SIGTERM before Slurm ended the step."""
    ranks: dict[int, None] = {}
    for rank, line in lines:
        if job_log.ABORTED.search(line):
            break
        if line.startswith(_RECEIVED) and rank != NO_RANK:
            ranks[rank] = None
    return [End("", (rank,), job_log.how(-signal.SIGTERM), False) for rank in ranks]


def _table(lines: Sequence[str]) -> list[tuple[str, bool, End]]:
    """Return (time, whether it is not the first observed failure, end) of ranks in torchrun's tables, of which every
    node prints one."""
    ends: list[tuple[str, bool, End]] = []
    fields: dict[str, str] = {}
    root = False
    forced = {found[1] for line in lines if (found := _FORCED.search(line))}
    for line in lines:
        root = root or line.startswith(_ROOT)
        if found := _FIELD.match(line):
            fields[found[1]] = found[2]
            complete = found[1] == "exitcode" and {"host", "rank"} <= fields.keys()
            if complete and _NUMBER.fullmatch(fields["exitcode"]) and _NUMBER.fullmatch(fields["rank"]):
                how = job_log.how(int(fields["exitcode"]))
                by_agent = not root and (how == "Terminated" or found[4] in forced)
                ends.append(
                    (fields.get("time", ""), not root, End(fields["host"], (int(fields["rank"]),), how, by_agent))
                )
                fields = {}
        elif line.startswith("====="):
            root = False
    return ends


def _of_deepspeed(lines: Sequence[str], with_error: set[int]) -> list[End]:
    """Return the ends in the messages of DeepSpeed's launcher on one node. The rank that failed is the only one
    without an error; if there are several, the end has no rank."""
    several = any(_NODES.search(line) for line in lines)  # local ranks are then no ranks
    spawned = {found[1]: int(found[2]) for line in lines if not several and (found := _SPAWNED.search(line))}
    done = {spawned[found[1]] for line in lines if (found := _SUCCEEDED.search(line)) and found[1] in spawned}
    ends = [End("", (rank,), job_log.SUCCEEDED, False) for rank in sorted(done)]
    code = next((int(found[1]) for line in lines if (found := _RETURNED.search(line))), 0)
    if code < 0 or (code > 0 and not with_error):
        left = set(spawned.values()) - done - with_error
        ends.append(End("", tuple(left) if len(left) == 1 else (), job_log.how(code), False))
    return ends


def _assigned(errors: Sequence[tuple[int, str, str]], slurm: JobLog) -> list[tuple[int, str, str]]:
    """Return the errors, with the rank of one that was printed without it if only one rank is left that failed."""
    with_rank = {rank for rank, _, _ in errors}
    nameless = [error for error in errors if error[0] == NO_RANK and not causes.is_secondary_text(error[1])]
    failed = {rank for end in slurm.ends if not end.after_abort and not end.succeeded for rank in end.ranks} - with_rank
    if len({error for _, error, _ in nameless}) == 1 and len(failed) == 1:
        return [(next(iter(failed)) if one in nameless else one[0], *one[1:]) for one in errors]
    return list(errors)


def _first_of_each(errors: Sequence[tuple[int, str, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield one error of each rank: its first that is not secondary, or else its first."""
    by_rank: dict[int, list[tuple[int, str, str]]] = {}
    for error in errors:
        by_rank.setdefault(error[0], []).append(error)
    chosen = set()
    for found in by_rank.values():
        worker = [one for one in found if WORKER_KILLED.search(one[1])]
        cause = [one for one in found if not causes.is_secondary_text(one[1])]
        chosen.add((worker or cause or found)[0])
    yield from dict.fromkeys(error for error in errors if error in chosen)


def _tails(logs: Sequence[Log], labels: Labels) -> dict[int, str]:
    tails: dict[int, str] = {}
    for log in logs:
        for rank, line in _lines(log, labels):
            if rank != NO_RANK and line.strip() and not job_log.is_from_slurm(line):
                tails[rank] = line.strip()
    return tails


def _unknown(evidence: Evidence, size: int) -> Iterator[str]:
    if any(one.record.rank == NO_RANK for one in evidence.found):
        yield "which rank printed the error: the lines have no rank; srun -l, or torchrun --tee 3, shows it"
    if any(one.record.rank == LAUNCHER for one in evidence.found):
        yield "why the ranks ended: only errors of the launcher are here; the logs of the other nodes show it"
    if evidence.found and not evidence.log.ends:
        yield "how each rank ended: the messages of srun or torchrun's table show it"
    if any(not end.ranks for end in evidence.log.ends):
        yield "which rank it was: DeepSpeed's launcher does not print it; deepspeed --enable_each_rank_log=FOLDER does"
    if evidence.lists_failed_ranks:
        yield "whether there were more ranks: torchrun lists only those that failed; print WORLD_SIZE at the start"
    if not any(evidence.hosts.values()) and evidence.found:
        yield "the nodes of the ranks: srun's messages or torchrun's table show them"
    if all(causes.is_secondary(one.record) for one in evidence.found) and not evidence.flight:
        yield (
            "where each rank was: dumps of torch's flight recorder show it (TORCH_FR_BUFFER_SIZE=2000 "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1), or hpcinit's stacks"
        )


def dumps_in(place: Path) -> Mapping[int, Mapping[str, object]]:
    """Return the flight-recorder dumps beside the logs."""
    return flight_recorder.read_folder(place) if place.is_dir() else {}


LIMIT = timedelta(seconds=15)
OURS = (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP, run_folder.SUBMISSION)
FIELDS = ("JobID", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "NodeList", "Reason")
_OF_JOB = re.compile(r"(?:^|[^0-9])(\d+(?:_\d+)?)\.(?:out|err|log)$")  # slurm-123.out
OVER = {"FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}


@dataclass(frozen=True)
class ForeignJob:
    """files: the logs that were read. slurm: the fields of sacct or scontrol, by their names, for JSON."""

    files: tuple[Path, ...]
    logs: Foreign
    slurm: Mapping[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> tuple[str, ...]:
        if self.slurm:
            return self.logs.unknown
        return (*self.logs.unknown, "how Slurm ended the job: sacct -j JOB -o State,ExitCode,MaxRSS shows it")


def find(name: str) -> ForeignJob | None:
    """Return the job whose logs are at the path `name`; None if it is no file, no folder with logs, or a run folder."""
    place = Path(name)
    if not name or not place.exists() or (place.is_dir() and any(_ours(place))):
        return None
    logs = files(place)
    if not logs:
        return None
    job = next((found[1] for path in logs if (found := _OF_JOB.search(path.name)) and "slurm" in path.name), "")
    shown = _shown(job) if job else {}
    return _job(logs, (_accounted(job) or _renamed(shown)) if job else {}, place, scontrol.preempted_at(shown))


def _ours(place: Path) -> list[Path]:
    """Return the files of run folders at `place` or one level below it."""
    return [path for name in OURS for path in (*place.glob(name), *place.glob(f"*/{name}"))]


def of_slurm(job_id: str) -> ForeignJob | None:
    """Return the job with this id from Slurm; None if Slurm does not know it, or if it has neither a log nor failed."""
    if not re.fullmatch(r"\d+(_\d+)?", job_id):
        return None
    shown = _shown(job_id)
    known = _accounted(job_id) or _renamed(shown)
    if not known:
        return None
    names = {shown.get("StdOut", ""), shown.get("StdErr", ""), f"slurm-{job_id}.out"}
    files = sorted(path for name in names if name and (path := Path(name)).is_file())
    if not files and state(known) not in OVER:
        return None
    return _job(files, known, None, scontrol.preempted_at(shown))


def _shown(job_id: str) -> dict[str, str]:
    return next(iter(scontrol.records(_output("scontrol", "--all", "show", "job", job_id), "JobId")), {})


def _job(files: list[Path], slurm: Mapping[str, str], place: Path | None, preempted_at: str) -> ForeignJob:
    name = state(slurm)
    dumps = dumps_in(place) if place else {}
    logs = gather(read(files), name if name in OVER else "", dumps, preempted_at)
    return ForeignJob(tuple(files), logs, slurm)


def state(slurm: Mapping[str, str]) -> str:
    """Return the state without its reason: CANCELLED of 'CANCELLED by 1000'."""
    return slurm.get("State", "").partition(" ")[0]


def _accounted(job_id: str) -> dict[str, str]:
    """Return sacct's fields of the job and the largest MaxRSS of its steps; {} without accounting."""
    if not shutil.which("sacct"):
        return {}
    options = ("--noheader", "--parsable2", f"--format={','.join(FIELDS)}")
    rows = [line.split("|") for line in _output("sacct", f"--jobs={job_id}", *options).splitlines()]
    rows = [row for row in rows if len(row) == len(FIELDS)]
    if not rows:
        return {}
    most = max((row[4] for row in rows if row[4]), key=_kilobytes, default="")
    return dict(zip(FIELDS, rows[0], strict=True)) | {"MaxRSS": most}


def _kilobytes(text: str) -> float:
    """Return the size of '1234K' or '2.5G'."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return float(found[1]) * 1024.0 ** ("KMGT".find(found[2] or "K")) if found else 0.0


def _renamed(shown: Mapping[str, str]) -> dict[str, str]:
    """Return scontrol's fields with sacct's names."""
    names = {"JobID": "JobId", "State": "JobState", **{name: name for name in FIELDS[2:]}}
    return {name: shown[key] for name, key in names.items() if key in shown}


def _output(*command: str) -> str:
    try:
        done = slurm_client.run(list(command), at_most=LIMIT)
    except (slurm_client.Unreachable, OSError):
        return ""
    return done.stdout if done.status == 0 else ""
