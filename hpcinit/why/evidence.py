"""Defines the input and the output of a diagnosis: the Evidence about a run, and the Verdict."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcinit.base.text import rank_names
from hpcinit.records import program_use
from hpcinit.records.error_records import Found
from hpcinit.records.hang_report import HangReport
from hpcinit.records.job_log import JobLog
from hpcinit.why.hang_verdict import HangVerdict

# Values for the rank of an error: NO_RANK if the rank is unknown, LAUNCHER if the launcher printed the error.
NO_RANK, LAUNCHER = -1, -2
AGREE_S = 0.5  # clocks that differ by less than this count as equal, because writing a file takes some time


@dataclass(frozen=True)
class SetupLine:
    """A line of the batch script that failed before the ranks started.

    typed: the line as the user wrote it, or '' if unknown.
    message: the printed line that shows why it failed, or ''.
    output: the last lines that the script printed.
    ended: whether the script ended at this line. If not, it continued and started the ranks.
    """

    typed: str
    status: int
    message: str
    ended: bool
    output: tuple[str, ...] = ()


# A call's number, its type and its sizes ('' for sizes that may differ)
Position = tuple[int, str, tuple[str | None, ...]]


@dataclass(frozen=True)
class Watched:
    """A message that torch's watchdog printed on a rank.

    rank: the rank, or -1 if unknown.
    group: the process group, '' for the group of all ranks, or None if unknown.
    position: the call that timed out, or None.
    enqueued: the number of the last call that the rank made, or None if unknown.
    stuck: whether the message reports that the watchdog itself is blocked.
    """

    rank: int
    group: str | None
    position: Position | None = None
    enqueued: int | None = None
    stuck: bool = False


@dataclass(frozen=True)
class Evidence:
    """All facts about one run that a diagnosis uses.

    state, reason, exit_status: as `hpcinit status` shows them.
    who: the user who canceled the job, or '' if unknown.
    clocks: for each host, how many seconds the file server's clock is ahead of the host's.
    nodes: for each node that is down, Slurm's reason.
    hang: the hang report, or None.
    silence: if all ranks have stopped printing, what they are doing; else None.
    flight: what the dumps of torch's flight recorder show.
    tails: the last line in the log of each rank without an error record.
    step: the last step that rank 0 reported, or -1.
    uses: which of hpcinit's functions the program called (records/program_use.py).
    size: the world size, or 0 if unknown.
    hosts: the host of each rank, if known.
    returned: the ranks whose program ended with status 0.
    every_end_is_logged: whether the job's log has a line for each rank whose exit status is not 0.
    has_clock: whether the times of the errors are real times. Otherwise, they only show the order.
    preempted: whether Slurm reports that it preempted the job since its last start.
    lists_failed_ranks: whether the log lists only failed ranks, so the job may have more ranks.
    setup: a line of the batch script that failed before the ranks started, or None.
    watched: the messages of torch's NCCL watchdog.
    cut: the ranks whose tracebacks are cut off at the end of the log.
    handled: errors after which the same process continued the training.
    alarms: log lines that may show a failure but that no reader recognizes, with their ranks.
    trains: whether a log shows training steps.
    finished: whether a log shows that the program or the job completed.
    over: whether a line after the last training step reports that the training is finished.
    unread: lines before the failure that may show an earlier failure, but that no reader recognizes.
    skipped: whether parts of the logs were not read, or are missing.
    unregistered: the ranks that have not started, so that the other ranks wait for them.
    last_words: the ranks whose error is the last output of their process.
    """

    state: str
    reason: str = ""
    exit_status: int | None = None
    who: str = ""
    found: Sequence[Found] = ()
    log: JobLog = field(default_factory=JobLog)
    clocks: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)
    hang: HangReport | None = None
    silence: HangReport | None = None
    flight: HangVerdict = field(default_factory=HangVerdict)
    tails: Mapping[int, str] = field(default_factory=dict)
    step: int = -1
    time_min: int | None = None
    uses: str = program_use.WRAP
    size: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    returned: frozenset[int] = frozenset()
    every_end_is_logged: bool = False
    has_clock: bool = True
    lists_failed_ranks: bool = False
    preempted: bool = False
    setup: SetupLine | None = None
    watched: Sequence[Watched] = ()
    cut: Sequence[int] = ()
    handled: Sequence[str] = ()
    alarms: Sequence[tuple[int, str]] = ()
    trains: bool = False
    finished: bool = False
    over: bool = False
    unread: Sequence[str] = ()
    skipped: bool = False
    unregistered: tuple[int, ...] = ()
    last_words: frozenset[int | None] = frozenset()

    @property
    def at_step(self) -> str:
        """Return the last step as part of a sentence, such as ' (step 41)', or '' if no step was reported."""
        return f" (step {self.step})" if self.step >= 0 else ""

    @property
    def oom(self) -> str:
        """Return the line in which Slurm reports that the kernel killed a process for lack of memory, or ''."""
        return self.log.oom or "Slurm: OUT_OF_MEMORY" * (self.state == "OUT_OF_MEMORY")

    @functools.cached_property
    def ordered(self) -> list[Found]:
        """Return the error records, oldest first, by the clock of the file server."""
        return sorted(self.found, key=self.when)

    def when(self, one: Found) -> float:
        """Return the time of an error, converted to the clock of the file server."""
        return one.record.time + self.clocks.get(one.record.host, 0.0)

    @property
    def hangs(self) -> bool:
        """Return whether stacks or dumps show that ranks wait for other ranks."""
        report = self.hang or self.silence
        return bool(self.flight.culprits or (report and report.waiting))

    def verdict(self, headline: str, kind: str, do: str, **more: Any) -> Verdict:
        """Return a Verdict with the last reported step."""
        return Verdict(headline, kind, do, step=self.step, **more)

    def last_output(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the last line in the log of each of these ranks, if known."""
        return tuple(f"the last output of rank {rank}: {self.tails[rank]}" for rank in ranks if rank in self.tails)

    def named(self, ranks: Iterable[int]) -> str:
        """Return these ranks as text with their hosts, such as 'ranks 2-3 on n2'."""
        found = sorted(ranks)
        hosts = sorted({self.hosts.get(rank, "") for rank in found} - {""})
        return named(found) + (f" on {', '.join(hosts)}" if hosts else "")


@dataclass(frozen=True)
class Verdict:
    """The result of a diagnosis.

    headline: what failed first, and how.
    kind: one of base/failure_kinds.py.
    do: what the user should do.
    rank: the rank that failed, or None.
    ranks: all ranks at fault.
    time: when it failed, by the clock of the file server, or None if unknown.
    flight: which ranks cause a hang, according to torch's flight recorder.
    resubmit: whether the advice is to submit the run again. If the run continues automatically, `hpcinit why` replaces
        this advice (observe/continuation.py).
    error: the program's error without rank and time, or '' if `kind` identifies the failure. `hpcinit why` groups the
        failed tasks of a sweep by this text.
    certain: whether the evidence proves the verdict (ranking.py).
    doubt: what would make it certain, or ''.
    """

    headline: str
    kind: str
    do: str = ""
    rank: int | None = None
    host: str = ""
    time: float | None = None
    step: int = -1
    evidence: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()
    flight: HangVerdict = field(default_factory=HangVerdict)
    resubmit: bool = False
    error: str = ""
    ranks: tuple[int, ...] = ()
    certain: bool = True
    doubt: str = ""


def clocks(differences: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return how many seconds the file server's clock is ahead of each host's clock.

    Return {} if these differ by at most AGREE_S seconds between the hosts.

    differences: pairs of a host and a time difference. The difference is a file's modification time, which the server
        sets, minus the time that the host wrote into the file. A delayed write only makes the difference larger, so
        the smallest difference of each host counts.
    """
    found: dict[str, float] = {}
    for host, difference in differences:
        found[host] = min(difference, found.get(host, difference))
    return found if found and max(found.values()) - min(found.values()) > AGREE_S else {}


def named(ranks: Iterable[int]) -> str:
    return rank_names(sorted(ranks))
