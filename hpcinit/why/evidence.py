"""What is known of a run that failed, and what came of it: the values that go in and out of failure.judge."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcinit.records.error_records import Found
from hpcinit.records.hang_report import HangReport
from hpcinit.records.job_log import JobLog
from hpcinit.why.hang_verdict import HangVerdict

AGREE_S = 0.5  # clocks that differ by less are taken as one: a file may be written so late


@dataclass(frozen=True)
class Evidence:
    """state, reason, exit_status: as `hpcinit status` has them. who: who cancelled it, where accounting says.

    clocks: the file server's clock minus the node's, by host. nodes: Slurm's reason for a node that is down. hang:
    its report, None if there is none. flight: the verdict on the dumps of torch's flight recorder. tails: the last
    words in logs of ranks. step: the last that rank 0 told, -1 before.
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
    flight: HangVerdict = field(default_factory=HangVerdict)
    tails: Mapping[int, str] = field(default_factory=dict)
    step: int = -1
    time_min: int | None = None

    @property
    def at_step(self) -> str:
        """' (step 41)', or ''."""
        return f" (step {self.step})" if self.step >= 0 else ""

    @property
    def oom(self) -> str:
        """Slurm's word that the kernel has killed for memory, or ''."""
        return self.log.oom or "Slurm: OUT_OF_MEMORY" * (self.state == "OUT_OF_MEMORY")


@dataclass(frozen=True)
class Verdict:
    """headline: what failed first, and how. kind: one of base/errors.py. do: what next. rank: None where it is no
    rank's doing. time: on the common clock, None where nobody says when. flight: which ranks cause a hang, from torch's
    flight recorder. resubmit: whether all there is to do is to submit the run again, which Slurm does for a requeued
    job."""

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


def clocks(differences: Iterable[tuple[str, float]]) -> dict[str, float]:
    """By host, from (host, when a file was written by the server's clock minus what it says by the node's).

    A file that comes late makes a difference larger, never smaller: the smallest counts. Differences below AGREE_S
    between all hosts are no difference.
    """
    found: dict[str, float] = {}
    for host, difference in differences:
        found[host] = min(difference, found.get(host, difference))
    return found if found and max(found.values()) - min(found.values()) > AGREE_S else {}
