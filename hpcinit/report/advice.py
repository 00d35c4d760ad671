"""Finds the largest waste of GPU time in a run, and suggests one change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from hpcinit.base.text import counted
from hpcinit.records.run_folder import PREEMPTED
from hpcinit.records.save_interval import best_interval_s
from hpcinit.report import ledger
from hpcinit.report.ledger import Allocation, Ledger

WORDS = {
    PREEMPTED: "preemption",
    "node_fail": "node failure",
    "hang": "hang",
    "time_limit": "time limit",
    "failure": "failure",
    "slurm": "requeue by Slurm",
    "canceled": "cancellation",
}
ACTIONS = {
    ledger.START: "shorten cluster.setup, or start from a local disk or a container image",
    ledger.IMPORTS: "launch=fork imports once per node, and an environment on a local disk imports faster",
    ledger.INIT: "the start-up table shows the slow phase and its ranks",
    ledger.FIRST: "keep the compiled kernels in a cache folder that outlives the job",
    ledger.SAVE: "save less often, or only what a restart needs",
    ledger.RESTORE: "keep checkpoints on a faster file system",
    ledger.PHASES: "evaluate less often, or in a separate job",
    ledger.HANG: "hang.action=end with restart.max_restarts ends a hang after hang.after_s",
    ledger.END: "let the program exit at once after its last save",
    ledger.IDLE: "spare_nodes=0, because no failure needed a spare node",
    ledger.UNKNOWN: "call hpcinit.init() and run.progress() so that the time can be attributed",
}
LEAST_SHARE = 0.02  # a smaller loss needs no action
GAIN = 0.1  # suggest another save interval only if it avoids at least this share of the loss


class Loss(NamedTuple):
    """The row of the ledger that wasted the most GPU time.

    unit_s: the lost GPU-seconds, or node-seconds if the jobs had no GPUs.
    text: a sentence about the loss and what to do about it.
    """

    row: str
    unit_s: float
    text: str


def largest(found: Ledger) -> Loss | None:
    """Return the row of the ledger in which the most time was lost, or None if all losses are small.

    Training steps that were kept are not a loss.
    """
    rows = {row: amount.at for row, amount in found.rows.items() if row != ledger.KEPT}
    row = max(rows, key=lambda row: rows[row])
    if not found.unit_s or rows[row] < LEAST_SHARE * found.unit_s:
        return None
    about = f"{hours(rows[row])} {found.unit}"
    if row == ledger.REPEATED:
        return Loss(row, rows[row], f"{about} of steps lost or repeated{_after(found)}; {_interval(found, rows[row])}")
    action = ACTIONS[row]
    if row == ledger.IDLE and (needed := sum(len(one.starts) - 1 for one in found.allocations if one.starts)):
        action = f"compare spare_nodes with the failures: {counted(needed, 'restart')} inside the job"
    if row == ledger.IMPORTS and _forks(found):
        action = "an environment on a local disk imports faster, and restart.warm=true keeps it for restarts"
    return Loss(row, rows[row], f"{about}: {ledger.TITLES[row]}; {action}")


def _forks(found: Ledger) -> bool:
    """Return whether a fork server started any ranks."""
    reports = (start.report for one in found.allocations for start in one.starts)
    return any("forked" in rank.events for report in reports if report for rank in report.attempt.ranks)


def _after(found: Ledger) -> str:
    causes = Counter(WORDS.get(one.reason, one.reason) for one in interrupted(found))
    names = [counted(number, name) for name, number in causes.most_common()]
    return f" after {' and '.join(names)}" if names else ""


def interrupted(found: Ledger) -> list[Allocation]:
    """Return the allocations that ended some time after their last save, and therefore lost training steps."""
    return [one for one in found.allocations if one.rows[ledger.REPEATED].at > 0]


def _interval(found: Ledger, lost: float) -> str:
    """Return advice about saves, such as a better time between saves and how much time it would have saved.

    lost: the GPU-seconds of steps that were lost or repeated.
    """
    segments = [part for one in found.allocations for start in one.starts for part in start.segments]
    saves = [part for part in segments if part.row == ledger.SAVE and part.count]
    stepped = sum(part.amount.at for part in segments if part.row in (ledger.KEPT, ledger.REPEATED))
    number, failures = sum(part.count for part in saves), max(1, len(interrupted(found)))
    if not number or not stepped:
        return "save checkpoints more often, and at SIGTERM: if run.should_stop(): run.save(...)"
    save_s = max(1e-3, sum(part.amount.at for part in saves) / number)
    best, now = best_interval_s(save_s, stepped / failures), stepped / number
    mean = found.unit_s / found.charged_s
    kept = lost - failures * mean * best / 2 - (stepped / best - number) * save_s * mean
    if best > 0.8 * now or kept < GAIN * lost:
        return "the time between saves is close to the best: at a preemption, save at SIGTERM with run.should_stop()"
    return (
        f"a save every {minutes(best)} instead of {minutes(now)} would have kept about {hours(kept)}: run.should_save()"
    )


def by_node(found: Ledger) -> Iterator[str]:
    """Yield a sentence for each of the three nodes with the most failures. Skip nodes with only one failure.

    Failures in allocations with a single node are not counted, because the program may be the cause.
    """
    costs: dict[str, float] = {}
    times: Counter[str] = Counter()
    ends = sum(bool(start.fault) for one in found.allocations for start in one.starts)
    for one in found.allocations:
        for start in one.starts:
            if start.fault and one.nodes > 1:
                times[start.fault] += 1
                lost = sum(part.amount.at for part in start.segments if part.row in (ledger.REPEATED, ledger.HANG))
                costs[start.fault] = costs.get(start.fault, 0.0) + lost * one.units
    for node, number in times.most_common(3):
        if number > 1:
            spent = f"{hours(costs[node])} {found.unit}"
            yield (
                f"node {node} had the failed rank in {number} of {ends} failures ({spent}): "
                f"if hpcinit why doesn't blame the program, exclude the node with hpcinit nodes --add {node}"
            )


def hours(seconds: float) -> str:
    """Convert seconds to hours, as text such as '1,240', '12.3' or '0.0400'."""
    value = seconds / 3600
    return f"{value:,.{0 if value >= 99.5 else 1 if value >= 9.95 else 2 if value >= 0.095 else 4}f}"


def minutes(seconds: float) -> str:
    """Return a time as text: '12 min', or '30 s' if it is below two minutes."""
    return f"{seconds / 60:.0f} min" if seconds >= 119.5 else f"{seconds:.0f} s"
