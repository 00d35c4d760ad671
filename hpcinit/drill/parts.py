"""The parts of a drill: two undisturbed runs, then each fault with a restart after it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcinit.base.errors import Failure, RequestError
from hpcinit.base.text import counted
from hpcinit.drill import comparison, faults, findings
from hpcinit.drill.attempt import Attempt, Record, Save, SaveWatch, kinds, states
from hpcinit.drill.comparison import Resumed, Undisturbed
from hpcinit.drill.faults import Faults, Frozen, Interruption
from hpcinit.drill.findings import Finding
from hpcinit.drill.place import Place
from hpcinit.drill.progress_lines import Reader

FIRST_STEP_S = 600.0
AFTER_STATE = 10  # how many steps an attempt makes that restarts from an unfinished save
START_S = 2.0  # how long the local engine takes to start the program
# Limits of file sizes for a full disk: it must stop a checkpoint, but not the log.
LEAST_FILE, BYTES_OF_STEP = 4096, 600


@dataclass(frozen=True)
class Plan:
    """When each fault happens.

    at: for each fault that signals or kills ranks, how many steps are complete before it.
    killed: after how many steps all ranks are killed.
    cut: the saves that a kill interrupts.
    disk: the save during which the disk is full, and the largest size of a file in bytes; or None.
    unchecked: what the drill does not check.
    """

    at: dict[str, int]
    killed: int
    cut: Sequence[Save]
    disk: tuple[Save, int] | None
    unchecked: list[str]


@dataclass
class Part:
    """One part of the drill and its result."""

    name: str
    title: str
    text: str = ""
    findings: list[Finding] = field(default_factory=list)
    at: int = 0
    from_step: list[int | None] = field(default_factory=list)
    saved: int = 0
    lost_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the part for `--json`."""
        return {
            "part": self.name, "step": self.at, "saved": self.saved, "resumed_from": self.from_step, "text": self.text,
            "lost_s": round(self.lost_s, 1), "ok": not self.findings, "causes": [one.cause for one in self.findings],
        }  # fmt: skip


class Drill:
    """Runs the parts of a drill in the folders of `place`.

    env: the environment of the job.
    fewer: submits the job again with fewer ranks, or None if the drill must not try that.
    """

    fewer: Callable[[], Attempt] | None = None

    def __init__(self, place: Place, run: Path, env: Mapping[str, str], most_steps: int | None, grace_s: float) -> None:
        self.place, self.run, self.env = place, run, env
        self.most_steps, self.grace_s = most_steps, grace_s
        self.reader: Reader | None = None
        self.saves: list[Save] = []
        self.largest = 0  # bytes of the largest file of a save
        self.stops = False  # whether the program has stopped after SIGTERM
        self.restarts = 0

    def start(self, state: Path | None = None, restart: int = 1) -> Attempt:
        """Start the job.

        Remove what earlier attempts wrote to node-local folders, because the next attempt runs on another node.

        state: a copy of the folders to restore first, or None.
        restart: the number of the restart; 0 for a first attempt.
        """
        self.place.remove_outside()
        if state:
            self.place.restore(state)
        attempt = Attempt.start(self.place, self.run, self.env, restart)
        attempt.reader = self.reader
        return attempt

    def undisturbed(self, attempt: Attempt, frozen: Frozen | None = None) -> Record:
        """Run an attempt without a fault to its end. Raise Failure or RequestError if the drill cannot continue.

        frozen: copies the files during the attempt, or None.
        """
        watch = SaveWatch(attempt)
        try:
            killed = self._to_the_end(watch, frozen, self.most_steps)
            record = attempt.record(killed)
        finally:
            attempt.kill()
        if not self.saves:
            found = watch.saves()
            self.largest = max((save.largest for save in found), default=0)
            self.saves = states(found, self.largest)
        if refused := [str(one["path"]) for one in record.outside if one["refused"]]:
            raise RequestError(
                f"the program writes to {', '.join(refused[:3])}, outside of its working folder. A drill blocks this "
                "to protect your files: let the program write to a relative path, or to $HPCINIT_RUN"
            )
        if record.status:
            last = (
                record.error
                or (attempt.log() or attempt.job_log()).decode(errors="replace").strip().rpartition("\n")[2]
            )
            raise Failure(
                f"the program failed although the drill had caused no fault (exit status {record.status}): {last}"
            )
        loaded = [name for name in record.read if name in self.place.given and not name.endswith(".py")]
        if record.done == 0:
            seen = f" after the program read {loaded[-1]}" if loaded else ""
            raise RequestError(
                f"hpcinit found no training step{seen}. It recognizes torch optimizers, run.progress(step, total, "
                "loss=...), and lines such as 'step 3 loss 2.31'. If your lines differ, add a pattern for them, such "
                "as drill.pattern='it=(?P<step>\\d+) L=(?P<loss>\\S+)'"
            )
        # Adagrad has a state before its first step.
        if record.steps and record.steps[0] and record.steps[0][0].states and loaded:
            raise RequestError(
                "the program resumed from a checkpoint in the current folder, but a drill must start a new training "
                "run: exclude the checkpoints with --without FOLDER"
            )
        return record

    def _to_the_end(self, watch: SaveWatch, frozen: Frozen | None = None, most: int | None = None) -> bool:
        """Wait until the job ends or has made more than `most` steps. Return whether the program is still running.

        frozen: copies the files during the attempt, or None.
        """
        attempt = watch.attempt
        while attempt.running():
            watch.look()
            if frozen:
                frozen.look(watch)
            if most and attempt.steps() > most:
                return True
            if not attempt.steps() and time.monotonic() > attempt.began + FIRST_STEP_S:
                raise RequestError(f"no step was recognized within {FIRST_STEP_S:.0f} s: see hpcinit drill --help")
            time.sleep(0.01)
        watch.look()
        return False

    def plan(self, first: Record) -> Plan:
        """Choose the step at which each fault happens. first: the results of the first undisturbed run."""
        total, unchecked = first.done, list[str]()
        if len(first.steps) > 1 and not self.fewer:
            unchecked.append("a restart on fewer ranks (add --fewer-ranks N)")
        saves = [save for save in self.saves if save.steps < total]
        at = {faults.PREEMPTED: _between(saves, total, 0.3), faults.TIME_LIMIT: _between(saves, total, 0.7)}
        if len(first.steps) > 1:
            at[faults.RANK_KILLED] = _between(saves, total, 0.5)
        cut = [save for save in saves if save.steps > (saves[0].steps if len(saves) > 1 else 0)][:2]
        if not cut:
            unchecked.append(
                "a kill during a save, and a full disk: the drill saw no save before the end of the program"
            )
        killed = _all_killed(saves, total)
        disk = next(((save, max(save.files.values()) // 2) for save in self.saves if save.steps > killed + 1), None)
        if disk and disk[1] < LEAST_FILE + BYTES_OF_STEP * total:
            disk = None
        if cut and not disk:
            unchecked.append("a full disk: after the kill of all ranks, no save was large enough for this check")
        return Plan(dict(sorted(at.items(), key=lambda item: item[1])), killed, cut, disk, unchecked)

    def estimate_s(self, first: Record, plan: Plan) -> float:
        """Return about how many seconds the rest of the drill will take, including the second undisturbed run."""
        step_s = (first.seconds - first.begin_s) / first.done
        starts = 3 + len(plan.at) + len(plan.cut[:1]) * faults.MOST_STATES + bool(plan.disk) + bool(self.fewer)
        return starts * (first.begin_s + START_S) + 4 * step_s * first.done

    def parts(self, alone: Undisturbed, plan: Plan, frozen: Frozen) -> Iterator[Part]:
        """Simulate each fault, restart the program, and yield the result.

        Stop at the first resume that fails, because later resumes would fail in the same way. Each attempt that resumes
        after a fault ends with the next fault.
        """
        doing = Faults(self.grace_s, 60 + 5 * alone.first.seconds)
        watch, cut = SaveWatch(self.start(self.place.before, 0)), None
        for fault, at in [*plan.at.items(), ("", 0)]:
            if cut and cut.signal == "default" and fault == faults.TIME_LIMIT:
                continue  # the time limit would end the program like the preemption
            following = self._whole(doing.cut(fault, max(at, watch.from_step + 2), watch)) if fault else None
            if cut:
                yield (part := self._part(alone, [cut], [following.record if following else self._ended(watch)]))
                if part.findings:
                    return
            if following:
                watch, cut = self._next(following), following
        if frozen.killed:
            yield from self._after_loss(alone, plan, self._whole(frozen.killed), doing)
        if frozen.while_saving:
            cuts = [self._whole(one) for one in frozen.while_saving]
            yield self._part(alone, cuts, [self._ended(self._next(one), AFTER_STATE) for one in cuts])
        if frozen.killed and self.fewer:
            cut = replace(self._whole(frozen.killed), fault=faults.FEWER_RANKS)
            yield self._part(alone, [cut], [self._ended(self._with_fewer_ranks(cut, self.fewer), AFTER_STATE)])

    def _with_fewer_ranks(self, cut: Interruption, submit: Callable[[], Attempt]) -> SaveWatch:
        """Submit the program with fewer ranks. It resumes from the files that remained when all ranks were killed.

        cut: the killed attempt.
        submit: submits the program.
        """
        self.place.remove_outside()
        self.place.restore(cut.state)
        self.place.forget_reads()
        attempt = submit()
        attempt.reader = self.reader
        return SaveWatch(attempt, findings.newest(cut.saves), cut.saves)

    def _after_loss(self, alone: Undisturbed, plan: Plan, killed: Interruption, doing: Faults) -> Iterator[Part]:
        """Yield the result of the kill of all ranks, then the result of a full disk during the next attempt."""
        watch = self._next(killed)
        disk = self._whole(doing.full_disk(*plan.disk, watch)) if plan.disk else None
        yield (part := self._part(alone, [killed], [disk.record if disk else self._ended(watch)]))
        if disk and disk.record.status is not None:
            plan.unchecked.append("a full disk: the program ended before the save")
        elif disk and not part.findings:
            yield self._part(alone, [disk], [self._ended(self._next(disk), AFTER_STATE)])

    def _whole(self, cut: Interruption) -> Interruption:
        """Return `cut` without the incomplete saves, and without saves that contain only a part of the training state.

        A save is incomplete if it is smaller than in the undisturbed run.
        """
        files = {save.steps: save.files for save in self.saves}
        known = kinds(name for save in self.saves for name in save.files)

        def is_whole(save: Save) -> bool:
            if save.steps not in files:  # a save after the signal, or a temporary file: step_8.pt.tmp
                return not any(one in kind and one != kind for kind in kinds(save.files) for one in known)
            # Compare the total size and the kinds of names, because a name may contain the time. A complete temporary
            # file has the right size, too, if the program was killed between the last write and the rename.
            expected = files[save.steps]
            return sum(save.files.values()) >= 0.99 * sum(expected.values()) and kinds(save.files) >= kinds(expected)

        return replace(cut, saves=[save for save in states(cut.saves, self.largest) if is_whole(save)])

    def _next(self, cut: Interruption) -> SaveWatch:
        """Start the program again after a fault."""
        self.restarts += 1
        return SaveWatch(self.start(cut.state, self.restarts), findings.newest(cut.saves), cut.saves)

    def _ended(self, watch: SaveWatch, most: int | None = None) -> Record:
        """Wait until the attempt ends or has made `most` steps. Return its results."""
        try:
            killed = self._to_the_end(watch, most=most or self.most_steps)
            return watch.attempt.record(killed)
        finally:
            watch.attempt.kill()

    def _part(self, alone: Undisturbed, cuts: Sequence[Interruption], records: Sequence[Record]) -> Part:
        first = cuts[0]
        part = Part(first.fault, _title(first, self.grace_s), at=first.at, saved=findings.newest(first.saves))
        for cut, record in zip(cuts, records, strict=True):
            found = comparison.resumed(alone, record)
            if cut.fault == faults.FEWER_RANKS:  # fewer ranks read different batches
                found = replace(found, differs=None, compared=False)
            part.from_step.append(found.from_step)
            part.lost_s += max(0, cut.at - (found.from_step or 0)) * alone.step_s + record.begin_s
            new = [
                *findings.interruption_findings(alone, cut, self.stops),
                *findings.resume_findings(alone, cut, record, found),
            ]
            self.stops = self.stops or (cut.signal == "caught" and cut.done < alone.first.done and not cut.ran_on)
            part.findings += [one for one in new if one.cause not in {other.cause for other in part.findings}]
            part.text = part.text or _text(cut, found)
        if len(cuts) > 1:
            states = ", ".join(_from(from_step) for from_step in dict.fromkeys(part.from_step))
            part.text = f"{len(cuts)} copies of the unfinished save: {states}"
        return part


def _title(cut: Interruption, grace_s: float) -> str:
    return {
        faults.PREEMPTED: f"preempted at step {cut.at} (SIGTERM, {grace_s:g} s)",
        faults.RANK_KILLED: f"rank {cut.rank} killed at step {cut.at}",
        faults.ALL_KILLED: f"all ranks killed at step {cut.at}",
        faults.TIME_LIMIT: f"time limit at step {cut.at}",
        faults.WHILE_SAVING: f"killed while it saved step {cut.at}",
        faults.FULL_DISK: f"disk full at step {cut.at}",
        faults.FEWER_RANKS: "restarted on fewer ranks",
    }[cut.fault]


def _text(cut: Interruption, found: Resumed) -> str:
    """Return what happened, as in 'saved step 23, resumed at 24, losses equal'."""
    if found.from_step is None:
        return "the next attempt made no step"
    parts = []
    if cut.signal:
        saved = any(save.steps >= cut.at for save in cut.saves)
        parts.append(f"saved step {cut.saves[-1].steps}" if saved else f"no save at SIGTERM ({cut.signal})")
    parts.append(_from(found.from_step))
    done = cut.done
    if found.from_step < done:
        parts.append(f"{counted(done - found.from_step, 'step')} repeated")
    elif found.from_step > done and not (found.compared and found.differs is None):
        # With equal results, no step was skipped. The drill only missed the last step before the end.
        parts.append(f"{counted(found.from_step - done, 'step')} skipped")
    if found.compared:
        what = "losses" if comparison.losses(cut.record) else "weights"
        parts.append(f"{what} equal" if found.differs is None else f"{what} differ from step {found.differs + 1} on")
    return ", ".join(parts)


def _from(from_step: int | None) -> str:
    if from_step is None:
        return "no step"
    return f"resumed at {from_step + 1}" if from_step else "started again at step 0"


def _between(saves: Sequence[Save], total: int, share: float) -> int:
    """Return a number of steps between two saves, near the given share of all steps.

    total: the number of all steps.
    """
    wanted = max(1, round(share * total))
    earlier = [save.steps for save in saves if save.steps <= wanted] or [save.steps for save in saves[:1]]
    if not earlier:
        return wanted
    following = [save.steps for save in saves if save.steps > earlier[-1]] or [total]
    return earlier[-1] + max(1, round(0.4 * (following[0] - earlier[-1])))


def _all_killed(saves: Sequence[Save], total: int) -> int:
    """Return the number of steps after which to kill all ranks, if possible after two saves.

    Prefer a newer save whose number has more digits, such as 10 after 5. A program that compares the numbers as text
    then loads the older save.
    """
    pairs = [(a.steps, b.steps) for a, b in itertools.pairwise(saves)]
    longer = [b for a, b in pairs if len(str(b)) > len(str(a))]
    after = next(iter(longer), pairs[-1][1] if pairs else 0)
    return (
        _between([save for save in saves if save.steps <= after], total, after / total) if after else round(0.5 * total)
    )
