"""Explains a job that hpcinit did not submit, from what Slurm reports about it and from its logs.

The logs may be from srun, torchrun, accelerate, DeepSpeed, mpirun or Lightning.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from hpcinit.base.text import MOST_RANKS
from hpcinit.records import causes, hang_report, job_log, run_folder
from hpcinit.records.error_records import ErrorRecord, Found
from hpcinit.records.hang_report import HangReport
from hpcinit.records.job_log import JobLog
from hpcinit.slurm import queue, scontrol, slurm_client
from hpcinit.why import hang_verdict, log_lines, read_launchers, read_tracebacks, read_watchdog
from hpcinit.why.evidence import LAUNCHER, NO_RANK, Evidence
from hpcinit.why.log_lines import Line, Log
from hpcinit.why.read_tracebacks import Error

# The world size. NCCL prints 'nranks 8', and Lightning 'MEMBER: 1/8'. The world size of a checkpoint does not count:
# 'saved with world_size=10'.
_SIZE = re.compile(
    r"^(?!.*(?:saved|checkpoint|loaded|resum)).*?\b(?:(?:dist_)?world[_ ]size\b['\"]?\s*[:=]?\s*|nranks |MEMBER: \d+/)"
    r"(\d{1,6})(?!\d)",
    re.IGNORECASE | re.MULTILINE,
)
# Lightning prints before a rank waits for the others: 'Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/8'
_MEMBER = re.compile(r"GLOBAL_RANK: (\d{1,6}), MEMBER: \d+/(\d{1,6})\b")
# Slurm's state, as `scontrol show job` and `sacct` print it. Some scripts call these commands at the end.
_STATE = re.compile(
    r"^\s*(?:Job)?State[=:] ?([A-Z_]+)\b"
    r"|^\d+[\w.]*[| ].*?\b(OUT_OF_MEMORY|NODE_FAIL|TIMEOUT|PREEMPTED|DEADLINE|BOOT_FAIL)\b"
    r"|^\d+(?:_\d+)?[| ].*?\b(COMPLETED|FAILED|CANCELLED)\b",  # the row of the job, not of a step
    re.MULTILINE,
)
# Lines that no reader recognizes, but that may show the cause.
_ALARM = re.compile(
    r"(?i)\b(?:\w*error|\w*exception|fatal|fail(?:ed|ure)|abort(?:ed|ing)?|panic|killed|segmentation fault|core dumped|"
    r"terminated?|timed out|timeout|unable|cannot|refused|denied|exceeded|not found|unreachable|"
    r"no module named|signal \d+|lost communication|times out|can't|low on resource|not enough|insufficient|invalid|"
    r"missing ranks|no such file|closing signal|truncated|non-?finite|heartbeats?"
    r"|(?:is|are|was|became|found|detected) (?:nan|inf)s?)\b"
)
# Lines of Slurm, launchers, torch's watchdogs and stacks, and lines that the program logs below the level ERROR
_UNDERSTOOD = re.compile(
    r"^(?:sbatch|hpcinit): |torch/distributed/|torch\.distributed\.elastic|\[launch\.py:"
    r"|ProcessGroup[NG]|^=====|^-----|^Root Cause|^frame #\d|^\S+ FAILED$|Exception raised from|closing signal SIG"
    r"|^\s*(?:time|host|rank|exitcode|error_file|traceback) *:|\b(?:INFO|DEBUG|WARN|WARNING)\b|^\[?[IW]\d{3,4}\b"
    r"|Warning: |^\.\.\.$|^File \"|last\):"
)
_EVENT = re.compile(
    r"\bWarning +(?:Evicted|OOMKilling|SystemOOM|FailedMount|FailedScheduling|NodeNotReady|Preempt\w*)\b"
)
# Lost nodes, as Flux and Ray report them
_LOST_NODE = re.compile(r"\btype=node-failure .*\bon (\S+)|\baddress: (\S+) .*\bhas been marked dead\b")
# The ends of jobs as PBS, LSF, submitit and Kubernetes print them
_OTHER_ENDS = (
    ("TIMEOUT", re.compile(r"PBS: job killed: walltime|TERM_RUNLIMIT: job killed|: this job is timed-out")),
    ("PREEMPTED", re.compile(r"TERM_PREEMPT: job killed|: this job is preempted")),
    ("OUT_OF_MEMORY", re.compile(r"PBS: job killed: mem|TERM_MEMLIMIT: job killed")),
    ("CANCELLED", re.compile(r"TERM_(?:FORCE_)?(?:OWNER|ADMIN): job killed")),
    # kubectl get, with the age of the job
    (
        "COMPLETED",
        re.compile(r"(?s)^(?!.*\b(?:Failed|Error|Evicted) +\d+[smhd]).*\n[\w.-]+ +Succeeded +\d+[smhd]\w*(?:\n|\Z)"),
    ),
)
# _RESTARTED: torchrun restarts the ranks. _REQUEUED: Slurm requeues the job. _STARTED (below): ranks have started.
_RESTARTED = re.compile(r"\] Restarting worker group|Worker group FAILED\. .* will restart worker group")
_REQUEUED = re.compile(r"CANCELLED AT \S+ DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE)")
# Errors below these lines are consequences: Slurm ended the job, or refused it.
_LAST_LINE = re.compile(
    r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ DUE TO (?:TIME LIMIT|PREEMPTION)"
    r"|^sbatch: error: Batch job submission failed"
)
_STARTED = re.compile(f"{read_tracebacks.TRAINS.pattern}|{re.escape(read_tracebacks.HEADER)}|exitcode")
_EXIT_0 = re.compile(
    r"(?i)\W*(?:(?:job|train|srun|torchrun|script|program)[\w .]{0,20})?"
    r"(?:\brc|exit(?:ed)?(?: with)?(?:[ _](?:code|status))?|return[ _]code)\W{0,3}0(?:\s+\S*\d:\d\d\S*)?\s*\Z"
)
_FINISHED = re.compile(r"(?i)\b(?:finished|completed|done|success\w*)\b(?! (?:sav|load))")
# Lines that report the end of the training. If an agent fails later, the training has not failed.
_OVER = re.compile(
    r"(?i)worker group successfully finished|\b(?:training|fit(?:ting)?|run|job)\b\W{0,3}(?:is |was |has |has been )?"
    r"(?:done|finished|completed?|successful\w*|ended successfully)\b|\b(?:finished|completed) (?:the )?training\b"
    r"|`Trainer\.fit` stopped: `max_|\btrain\w*\.py finished\s*$|^\W*finished: \d+ (?:batches|steps|epochs)\b"
)
MOST_OF_NODE = 8  # a larger job may have several nodes, so that local ranks differ from global ranks
_HIGH_RANK = re.compile(r"(?i)rank[^\w\n]{0,12}(?:[89]|\d{2,6})\b|num processes: (?:9|\d{2})")
_ABORTED = ("code 134", "code 137", "code 143")  # SIGABRT, SIGKILL and SIGTERM, as a shell reports them
SHORTEST = 8  # characters; hpcinit searches other lines only for longer messages
MOST_AT_END = 100  # a report of success counts only in the last lines of a log, with the exit status 0 below
MOST_LAST = 20  # a report that the program is finished counts only in the last lines
_STACK = "(most recent call first):"  # of faulthandler
_PY_SPY = re.compile(r'^Thread \S+ \(\w+\): "MainThread"$', re.MULTILINE)
_RANK_OPTION = re.compile(r"Process \d+: .* --(?:gpu|(?:local[_-])?rank)[ =](\d{1,6})\b")  # the first line of py-spy
_FRAME = re.compile(r"^ +(\S+) \(([^():\n]+):(\d+)\)$", re.MULTILINE)  # of py-spy
_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+)", re.MULTILINE)
WORKER_GONE = re.compile(r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly")
# The process read from its worker, through a pipe or socket of Python's multiprocessing, when the worker ended.
_PIPE_ENDED = re.compile(r"(?:EOFError|BrokenPipeError|FileNotFoundError|Connection(?:Reset|Refused)Error)\b")
_OF_LOADER = re.compile(r"torch/utils/data/dataloader\.py.*multiprocessing/\w+\.py", re.DOTALL)
ENDED_BY_SLURM = {"CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE"}
WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal")


@dataclass(frozen=True)
class Foreign:
    """What the logs show about a job that hpcinit did not start.

    evidence: the facts in the logs.
    unknown: questions that the logs do not answer, each with a hint on what would answer it.
    """

    evidence: Evidence
    unknown: tuple[str, ...] = ()


def gather(
    logs: Sequence[Log],
    state: str = "",
    dumps: Mapping[int, Mapping[str, object]] | None = None,
    preempted_at: str = "",
) -> Foreign:
    """Return what the logs show about the failure of a job.

    state: Slurm's state of the job, or '' if unknown.
    dumps: the dumps of torch's flight recorder.
    preempted_at: when Slurm preempted the job, or ''.
    """
    known = log_lines.labels(logs)
    by_log = [_last_attempt([*log_lines.lines(log, known)]) for log in logs]
    lines = [line for found in by_log for line in found]
    processes = log_lines.ranks_of_processes(lines)
    lines = [_with_rank(line, processes) for line in lines]
    size = max([0, *(int(found[1]) for log in logs for found in _SIZE.finditer(log.text))])
    state = state or next(_states(lines), "")
    succeeded = (
        bool(by_log)
        and state in ("", "COMPLETED")
        and all(_succeeds(found[-MOST_AT_END:], completed=bool(state)) for found in by_log)
    )
    state = "COMPLETED" if succeeded else state
    slurm = job_log.read("\n".join(line.text for line in lines))
    ends = [end for _, _, end in sorted(read_launchers.table(lines), key=lambda one: one[:2])]
    of_ranks = known.task and not ends  # otherwise, srun's tasks are torchrun's agents
    agents = {end.host for end in slurm.ends if end.how.startswith("Exited with") and not end.after_abort}
    every_end = of_ranks and bool(slurm.ends)
    not_started = [one if of_ranks else replace(one, ranks=()) for one in slurm.not_started]
    ended_ranks, lost = tuple([*slurm.ends] if of_ranks else ends), tuple(dict.fromkeys((*slurm.lost, *_lost(lines))))
    slurm = replace(slurm, ends=ended_ranks, lost=lost, output=(), not_started=tuple(not_started))
    watched, errors = read_watchdog.read(lines)
    traced = [_of_process(one, processes) for one in read_tracebacks.read(lines)]
    every = _in_order([*traced, *([] if slurm.cancelled else read_launchers.unreachable(lines)), *errors], by_log)
    ended = bool(slurm.cancelled or preempted_at or state in ENDED_BY_SLURM)
    about = read_launchers.about_ends(lines)
    one_node = known.local and size <= MOST_OF_NODE and not any(_HIGH_RANK.search(log.text) for log in logs)
    ends_of = functools.partial(
        read_launchers.ends, about, listed=bool(slurm.ends), processes=processes, one_node=one_node
    )
    failed = any(not end.succeeded for end in (*slurm.ends, *ends_of(())))
    # If several processes print without a rank, one of them may fail while others continue to train.
    handled = [one for one in every if succeeded or (one.handled and not (failed and one.rank == NO_RANK))]
    cut = [one.rank for one in every if one.text == read_tracebacks.CUT]
    every = [one for one in every if one.text != read_tracebacks.CUT]
    errors = [one for one in every if one not in handled and not (ended and _lost_its_worker(one))]
    errors = _before_end(_without_caught(errors), lines if len(logs) == 1 else ())
    of_launcher = [one for one in errors if read_launchers.is_of_launcher(one)]
    errors = _assigned([one for one in errors if one not in of_launcher], slurm)
    with_error = {one.rank for one in errors if one.rank != NO_RANK}
    by_others = ends_of(with_error)
    slurm = replace(slurm, ends=(*by_others, *slurm.ends))
    errors = _assigned(errors, slurm)
    if not (errors or slurm.ends or slurm.not_started):  # otherwise, the launcher's errors are secondary
        host = agents.pop() if len(agents) == 1 else ""
        errors = [replace(one, rank=LAUNCHER, host=host) for one in sorted(of_launcher, key=read_launchers.is_report)]
    hosts = {rank: end.host for end in slurm.ends for rank in end.ranks if end.host}
    seen = {line.rank for line in lines if line.rank != NO_RANK}
    ranks = {*seen, *hosts, *(one.rank for one in errors if one.rank >= 0)}
    order = {id(one): float(at) for at, one in enumerate(errors)}
    records = tuple(
        Found(
            ErrorRecord(order[id(one)], one.rank, hosts.get(one.rank, one.host), _with_cause(one), one.traceback), 0.0
        )
        for one in _first_of_each(errors)
    )
    first = next((one for one in errors if not causes.is_secondary_text(one.text, one.traceback)), None)
    trained = max((at for at, line in enumerate(lines) if read_tracebacks.trains(line.text)), default=-1)
    evidence = Evidence(
        state or ("FAILED" if records or slurm.ends else "UNKNOWN"),
        found=records,
        log=job_log.with_preemption(slurm, preempted_at),
        size=max([size, *(rank + 1 for rank in ranks)]),
        hosts=hosts,
        tails=_tails(lines),
        flight=hang_verdict.verdict(dumps or {}, hosts),
        every_end_is_logged=every_end or bool(ends),
        has_clock=False,
        lists_failed_ranks=bool(ends) and not size and (known.local or len({end.host for end in ends}) > 1),
        preempted=bool(preempted_at),
        watched=watched,
        cut=cut,
        handled=[causes.short(one.text) for one in handled],
        alarms=[] if succeeded else [*_events(by_log), *_alarms(lines[trained + 1 :])],
        trains=trained >= 0,
        finished=state == "COMPLETED" or any(_FINISHED.search(line.text) for line in lines[-MOST_LAST:]),
        over=any(_OVER.search(line.text) for line in lines[trained + 1 :]),
        hang=_of_stacks(logs),
        unregistered=_unregistered(lines) if trained < 0 else (),
        unread=_unread(lines, traced, first, several=len(logs) > 1),
        skipped=bool(cut) or any(log.skipped for log in logs),
        last_words=frozenset(one.rank if one.rank >= 0 else None for one in _last_words(errors, lines)),
    )
    skipped = sum(log.skipped for log in logs) >> 20
    unread = f"the other {skipped} MB of the logs: hpcinit only searched them for failure messages"
    return Foreign(evidence, (*_unknown(evidence, size), *([unread] if skipped else [])))


def _with_rank(line: Line, processes: Mapping[str, int]) -> Line:
    """Return the line. If it has no rank, but a process ID in its prefix, set the rank of this process.

    processes: for each process ID, its rank.
    """
    rank = processes.get(log_lines.process(line.stream), NO_RANK) if line.rank == NO_RANK else NO_RANK
    return line if rank == NO_RANK else line._replace(rank=rank, stream=str(rank))


def _states(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the states of the job in its log, Slurm's first. The ends that other schedulers print get Slurm's names."""
    log = "\n".join(line.text for line in lines)
    found = list(_STATE.finditer(log))
    yield from (one[2] for one in found if one[2])  # a step may have failed although the job completed
    yield from (one[1] or one[3] for one in found)
    yield from (end for end, text in _OTHER_ENDS if text.search(log))


def _lost(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the nodes that Flux or Ray reports as lost."""
    for line in lines:
        if found := _LOST_NODE.search(line.text):
            yield found[1] or found[2]


def _of_process(error: Error, processes: Mapping[str, int]) -> Error:
    """Return the error. If it has no rank, but a process ID in its message, set the rank of this process.

    processes: for each process ID, its rank.
    """
    rank = (
        error.rank
        if error.rank != NO_RANK
        else processes.get(log_lines.process(f"{error.text}\n{error.traceback}"), NO_RANK)
    )
    return error if rank == error.rank else replace(error, rank=rank)


def _in_order(errors: Sequence[Error], logs: Sequence[Sequence[Line]]) -> list[Error]:
    """Return the errors in the order in which they occurred.

    If there are several logs, and each error has a time in its line or above it, sort the errors by these times.
    Otherwise, keep the order of the lines.
    """
    found = sorted(errors, key=lambda one: one.number)
    clocks: list[str] = []
    for log in logs if len(logs) > 1 else ():
        clock = ""
        for line in log:
            clock = line.clock or clock
            clocks.append(clock)
    at = [clocks[one.number] if one.number < len(clocks) else "" for one in found]
    if not all(at):
        return found
    return [one for _, one in sorted(zip(at, found, strict=True), key=lambda pair: pair[0])]


def _succeeds(end: Sequence[Line], *, completed: bool) -> bool:
    """Return whether the program reports success after its last traceback, and its exit status is 0.

    The exit status alone is no proof, because it may be that of `tee` or of another command of the batch script.

    completed: whether Slurm reports the state COMPLETED, so that the log does not need to show the exit status.
    """
    before: dict[str, str] = {}  # the line above, of each process
    traced = -1
    for at, line in enumerate(end):
        if read_tracebacks.HEADER in line.text and not read_tracebacks.is_ignored(before.get(line.stream, "")):
            traced = at
        before[line.stream] = line.text
    after = [line.text for line in end[traced + 1 :]]
    if completed:
        return any(_OVER.search(text) for text in after)
    return bool(after and _EXIT_0.match(after[-1])) and any(_FINISHED.search(text) for text in after)


def _unregistered(lines: Sequence[Line]) -> tuple[int, ...]:
    """Return the ranks for which the others wait at the start, according to Lightning's log lines."""
    found = {int(match[1]): int(match[2]) for line in lines if (match := _MEMBER.search(line.text))}
    if len(found) < 2:  # this may be the log of only one rank
        return ()
    return tuple(sorted(set(range(min(max(found.values()), MOST_RANKS))) - found.keys()))


def _before_end(errors: list[Error], lines: Sequence[Line]) -> list[Error]:
    """Return the errors above the line in which Slurm reports that it ended or refused the job.

    If Slurm refused a step before these errors, the refusal is the first error.

    lines: the lines of the log, or () for several logs, whose order is unknown. For (), return all errors.
    """
    over = next((at for at, line in enumerate(lines) if _LAST_LINE.search(line.text)), len(lines))
    errors = [one for one in errors if not over <= one.number < len(lines)]
    return [*read_launchers.refused_step(lines, errors), *errors]


def _lost_its_worker(error: Error) -> bool:
    """Return whether a process failed because its DataLoader worker had ended."""
    pipe = _PIPE_ENDED.match(error.text) and _OF_LOADER.search(error.traceback)
    return bool(pipe or WORKER_GONE.search(error.text))


def _of_stacks(logs: Sequence[Log]) -> HangReport | None:
    """Return a hang report from files with stacks that faulthandler or py-spy wrote, one file per rank.

    Return None if there are no such files.
    """
    stacks = {}
    for log in logs:
        text = _FRAME.sub(r'  File "\2", line \3 in \1', _PY_SPY.sub(f"Thread 0x1 {_STACK}", log.text))
        option = _RANK_OPTION.match(log.text)
        rank = int(option[1]) if option and log.rank is None else log.rank
        if rank is not None and _STACK in text:  # faulthandler writes the main thread last
            main = _THREAD.findall(text)[-1:] if text == log.text else ["0x1"]
            stacks[rank] = hang_report.place(f"main thread {''.join(main)}\n{text}")
    stacks = {rank: place for rank, place in stacks.items() if place.at or place.waits_in}  # other stacks are cut off
    return hang_report.report([], stacks, 0.0, 0) if len(stacks) > 1 else None


def _last_attempt(lines: list[Line]) -> list[Line]:
    """Return the lines after the last restart of the ranks, or all lines if the ranks have printed nothing since."""
    for shown, started in ((_RESTARTED, _STARTED), (_REQUEUED, read_tracebacks.TRAINS)):
        begun = max((number for number, line in enumerate(lines) if started.search(line.text)), default=0)
        last = max((number for number, line in enumerate(lines[:begun]) if shown.search(line.text)), default=-1)
        lines = lines[last + 1 :]
    return lines


def _alarms(lines: Sequence[Line]) -> list[tuple[int, str]]:
    """Return the lines that may show a failure, with their ranks.

    lines: the lines after the last training step.
    """
    return [
        (line.rank, line.text.strip()) for line in lines if _ALARM.search(line.text) and "NCCL INFO" not in line.text
    ]


def _unread(lines: Sequence[Line], errors: Sequence[Error], first: Error | None, *, several: bool) -> list[str]:
    """Return lines before `first` that may show an earlier failure, but that no reader recognizes.

    These are lines that look like an error. The last line of every other process counts, too, unless a similar line was
    printed.

    errors: the recognized errors.
    several: whether there are several logs, whose lines are not in the order of time.
    """
    known = {part.strip() for one in errors for part in f"{one.text}\n{one.traceback}".splitlines()}
    messages = [text for one in errors if len(text := causes.detail(one.text)) > SHORTEST]
    own, end = "", len(lines)
    if first and first.number < len(lines):
        own, end = lines[first.number].stream, end if several else first.number
    steps: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        if read_tracebacks.TRAINS.search(line.text):
            steps.setdefault(line.stream, []).append(number)
    # While a rank fails, another one can finish the step that both have started.
    most = max(steps.values(), key=len, default=[])
    since = most[-1 - read_tracebacks.HANDLED_AFTER] if len(most) > read_tracebacks.HANDLED_AFTER else -1
    last: dict[str, str] = {}
    shapes: Counter[str] = Counter()
    found = []
    for number, line in enumerate(lines[:end]):
        text = line.text.strip()
        if number <= steps.get(line.stream, [since])[-1]:
            continue
        is_known = text in known or _is_understood(text) or any(message in text for message in messages)
        if is_known or not text or line.text.startswith("  "):
            last[line.stream] = "" if is_known else last.get(line.stream, "")
            continue
        shapes[_shape(text)] += 1
        last[line.stream] = text
        if _ALARM.search(text) and not (line.stream == own and read_tracebacks.is_exception(text)):
            found.append(text)
    odd = [text for stream, text in last.items() if text and stream != own and shapes[_shape(text)] == 1]
    return list(dict.fromkeys([*found, *odd]))


def _is_understood(text: str) -> bool:
    return bool(
        _UNDERSTOOD.search(text) or job_log.is_from_slurm(text) or _SIZE.search(text) or causes.is_secondary_text(text)
        or read_launchers.is_end(text) or job_log.oom([text]) or read_tracebacks.is_chain(text)
    )  # fmt: skip


def _shape(text: str) -> str:
    """Return the text without its numbers."""
    return re.sub(r"[\d.]+", "", text.strip())


def _last_words(errors: Sequence[Error], lines: Sequence[Line]) -> Iterator[Error]:
    """Yield the errors that are the last output of their process."""
    printed: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        if line.text.strip():
            printed.setdefault(line.stream, []).append(number)
    for error in errors:
        if error.number < len(lines):
            of_process, message = printed.get(lines[error.number].stream, []), error.text.splitlines()
            start = bisect.bisect_right(of_process, error.number)
            after = (lines[of_process[at]].text.strip() for at in range(start, len(of_process)))
            if all(text in message or _is_understood(text) for text in after):
                yield error


def _events(logs: Sequence[Sequence[Line]]) -> list[tuple[int, str]]:
    """Return the warnings in Kubernetes events (kubectl get events), each with NO_RANK."""
    return [(NO_RANK, line.text.strip()) for log in logs for line in log if _EVENT.search(line.text)]


def _assigned(errors: Sequence[Error], slurm: JobLog) -> list[Error]:
    """If exactly one error has no rank, and exactly one failed rank has no error, assign the error to that rank."""
    with_rank = {one.rank for one in errors}
    nameless = [one for one in errors if one.rank == NO_RANK and not causes.is_secondary_text(one.text)]
    ends = [end for end in slurm.ends if not end.after_abort and not end.succeeded]
    # A rank that a signal ended was probably aborted after another rank had failed.
    own = [end for end in ends if end.how.startswith("Exited with") and not end.how.endswith(_ABORTED)]
    failed = {rank for end in own or ends for rank in end.ranks} - with_rank
    if len({one.text for one in nameless}) == 1 and len(failed) == 1:
        return [replace(one, rank=next(iter(failed))) if one in nameless else one for one in errors]
    return list(errors)


def _without_caught(errors: Sequence[Error]) -> list[Error]:
    """If a traceback shows a cause, drop the errors that other ranks printed without a traceback.

    An error without a traceback is one that the program caught.
    """
    traced = {one.rank for one in errors if not one.alone and not causes.is_secondary_text(one.text, one.traceback)}
    return [one for one in errors if not one.alone or not traced or one.rank in traced]


def _first_of_each(errors: Sequence[Error]) -> Iterator[Error]:
    """Yield one error per rank: its first error that no other rank caused, or else its first error."""
    by_rank: dict[int, list[Error]] = {}
    for error in errors:
        by_rank.setdefault(error.rank, []).append(error)
    for found in by_rank.values():
        worker = [one for one in found if WORKER_KILLED.search(one.text)]
        cause = [one for one in found if not causes.is_secondary_text(one.text, one.traceback)]
        # Threads of torch and of loggers fail when the process ends, before the process prints its traceback.
        cause.sort(key=lambda one: one.in_thread and causes.message(one.text) is None)
        yield (worker or cause or found)[0]


def _tails(lines: Sequence[Line]) -> dict[int, str]:
    return {
        line.rank: line.text.strip()
        for line in lines
        if line.rank != NO_RANK and line.text.strip() and not job_log.is_from_slurm(line.text)
    }


def _unknown(evidence: Evidence, size: int) -> Iterator[str]:
    if any(one.record.rank == NO_RANK for one in evidence.found):
        yield (
            "which rank printed the error: the log lines have no rank number; next time start with srun -l or "
            "torchrun --tee 3"
        )
    if any(one.record.rank == LAUNCHER for one in evidence.found):
        yield "why the ranks ended: these logs contain only errors of the launcher; read the logs of the other nodes"
    if evidence.found and not evidence.log.ends:
        yield "how each rank ended: srun's messages or torchrun's table show it"
    if any(not end.ranks for end in evidence.log.ends):
        yield "which rank failed: DeepSpeed's launcher does not print it; deepspeed --enable_each_rank_log=FOLDER does"
    if evidence.lists_failed_ranks:
        yield "whether there were more ranks: torchrun lists only those that failed; print WORLD_SIZE at the start"
    if not any(evidence.hosts.values()) and evidence.found:
        yield "the nodes of the ranks: srun's messages or torchrun's table show them"
    if all(causes.is_secondary(one.record) for one in evidence.found) and not evidence.flight:
        yield (
            "where each rank was: hpcinit's stacks show it, or dumps of torch's flight recorder "
            "(TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1)"
        )


LIMIT = timedelta(seconds=15)
OURS = (run_folder.SCRIPT, run_folder.SPEC, run_folder.SWEEP, run_folder.SUBMISSION)
FIELDS = ("JobID", "State", "ExitCode", "DerivedExitCode", "NodeList", "Reason")
_OF_JOB = re.compile(r"(?:^|[^0-9])(\d+(?:_\d+)?)\.(?:out|err|log)$")  # slurm-123.out
OVER = {"FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}


@dataclass(frozen=True)
class ForeignJob:
    """A job that hpcinit did not start.

    files: the logs that were read.
    slurm: the fields that sacct or scontrol prints, by their names, for JSON.
    """

    files: tuple[Path, ...]
    logs: Foreign
    slurm: Mapping[str, str] = field(default_factory=dict)

    @property
    def unknown(self) -> tuple[str, ...]:
        if self.slurm:
            return self.logs.unknown
        return (*self.logs.unknown, "how Slurm ended the job: sacct -j JOB -o State,ExitCode,MaxRSS shows it")


def find(name: str, dumps: Mapping[int, Mapping[str, object]] | None = None) -> ForeignJob | None:
    """Return the job whose logs are at the path `name`, or None if there are no logs or if it is a run folder.

    dumps: the dumps of torch's flight recorder, found next to the logs.
    """
    place = Path(name)
    if not name or not place.exists() or (place.is_dir() and any(_ours(place))):
        return None
    logs = log_lines.files(place)
    if not logs:
        return None
    job = next((found[1] for path in logs if (found := _OF_JOB.search(path.name)) and "slurm" in path.name), "")
    shown = _shown(job) if job else {}
    return _job(logs, (_accounted(job) or _renamed(shown)) if job else {}, dumps or {}, scontrol.preempted_at(shown))


def _ours(place: Path) -> list[Path]:
    """Return the files of run folders at `place` or one level below it."""
    return [path for name in OURS for path in (*place.glob(name), *place.glob(f"*/{name}"))]


def of_slurm(job_id: str) -> ForeignJob | None:
    """Return the job with this id from Slurm. Return None if Slurm has no record of the job.

    Also return None if the job has not failed and has no log.
    """
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
    return _job(files, known, {}, scontrol.preempted_at(shown))


def _shown(job_id: str) -> dict[str, str]:
    return next(iter(scontrol.records(_output("scontrol", "--all", "show", "job", job_id), "JobId")), {})


def _job(
    files: list[Path], slurm: Mapping[str, str], dumps: Mapping[int, Mapping[str, object]], preempted_at: str
) -> ForeignJob:
    name = state(slurm)
    logs = gather(log_lines.read(files), name if name in OVER else "", dumps, preempted_at)
    return ForeignJob(tuple(files), logs, slurm)


def state(slurm: Mapping[str, str]) -> str:
    """Return Slurm's state without its reason: CANCELLED for 'CANCELLED by 1000'."""
    return slurm.get("State", "").partition(" ")[0]


def _accounted(job_id: str) -> dict[str, str]:
    """Return sacct's fields of the job; {} without accounting."""
    with contextlib.suppress(slurm_client.Unreachable):
        rows = queue.accounting([f"--jobs={job_id}", f"--format={','.join(FIELDS)}"], len(FIELDS), at_most=LIMIT)
        return dict(zip(FIELDS, rows[0], strict=True)) if rows else {}
    return {}


def _renamed(shown: Mapping[str, str]) -> dict[str, str]:
    """Return scontrol's fields under sacct's names."""
    names = {"JobID": "JobId", "State": "JobState", **{name: name for name in FIELDS[2:]}}
    return {name: shown[key] for name, key in names.items() if key in shown}


def _output(*command: str) -> str:
    try:
        done = slurm_client.run(list(command), at_most=LIMIT)
    except (slurm_client.Unreachable, OSError):
        return ""
    return done.stdout if done.status == 0 else ""


def _with_cause(error: Error) -> str:
    """Return the message of the error and of its direct cause.

    For an error of a launcher, omit the cause. If the cause is a lost connection, the error would count as secondary.
    """
    return error.text if error.rank == LAUNCHER else error.whole
