"""Compares a resumed attempt with an undisturbed one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcinit.drill.attempt import Record, Save
from hpcinit.drill.progress_lines import Point, last_digit
from hpcinit.records.drill_records import COPY, Step

EQUAL = 1e-6  # sums with at most this relative difference count as equal
AFTER_STEPS = 2  # a resume is exact if the weights are equal at more steps than this
SAME_LOSSES, FINE = 8, 1e-3  # losses are fine if there are this many different ones, and their last digit is this small
TIMES_NOISE = 4.0  # tolerance of losses, as a multiple of the largest difference between two undisturbed runs


@dataclass(frozen=True)
class Undisturbed:
    """Two runs without a fault. saves: the saves of the first run."""

    first: Record
    second: Record
    saves: Sequence[Save]

    @property
    def deterministic(self) -> bool:
        """Return whether both runs computed the same results."""
        pairs = [*zip(self.first.steps[:1], self.second.steps[:1], strict=False)]
        weights = all(close(a.weights, b.weights) for one, other in pairs for a, b in zip(one, other, strict=False))
        return weights and self._noise() <= self._digit()

    @property
    def exact(self) -> bool:
        """Return whether both runs had exactly equal weights at each step."""
        one, other = ([[step.weights for step in steps] for steps in run.steps] for run in (self.first, self.second))
        return bool(one) and one == other

    @property
    def tolerance(self) -> float:
        """Return the largest difference at which two losses still count as equal."""
        return max(1.5 * self._digit(), TIMES_NOISE * self._noise())

    @property
    def fine_losses(self) -> bool:
        """Return whether the losses are printed with enough digits to show any change."""
        return self._digit() <= FINE * max(map(abs, losses(self.first).values()), default=0.0)

    @property
    def world_size(self) -> int:
        """Return the number of ranks that ran training steps."""
        return max(1, len(self.first.steps))

    @property
    def step_s(self) -> float:
        """Return the mean duration of a step in seconds."""
        return max(0.0, self.first.seconds - self.first.begin_s) / max(1, self.first.done)

    def _digit(self) -> float:
        return last_digit([*losses(self.first).values()])

    def _noise(self) -> float:
        other = losses(self.second)
        both = [abs(loss - other[step]) for step, loss in losses(self.first).items() if step in other]
        return max((one for one in both if not math.isnan(one)), default=0.0)


@dataclass(frozen=True)
class Resumed:
    """An attempt compared with the undisturbed run.

    from_step: the number of steps in the loaded checkpoint, or None if it is unknown.
    by_weights: the step whose weights were loaded, or None if it is unknown.
    differs: the first step whose loss or weights differ, or None if all are equal.
    largest: the largest difference between two losses of the same step.
    compared: whether there was anything to compare.
    """

    from_step: int | None
    by_weights: int | None
    differs: int | None
    largest: float
    compared: bool

    @property
    def state_step(self) -> int | None:
        """Return the step whose weights were loaded, or `from_step` if it is unknown."""
        return self.from_step if self.by_weights is None else self.by_weights


def resumed(alone: Undisturbed, record: Record) -> Resumed:
    """Compare an attempt after a fault with the undisturbed run.

    alone: the undisturbed run.
    record: the results of the attempt.
    """
    reported, weighed = _from_step(alone.first, record), _by_weights(alone, record)
    from_step = weighed if reported is None else reported
    if (
        weighed is not None
        and reported is not None
        and (
            abs(weighed - reported) == 1  # a progress bar may be printed before or after it counts the step
            or 0 < reported < weighed  # the program counts batches from the start of the epoch
            or (reported == 0 and not _repeats(alone.first, record, weighed))  # the program rarely prints a line
        )
    ):
        from_step = weighed
    exact = alone.exact and from_step is not None and _same_weights(alone, record, from_step)
    differs, largest, compared = None, 0.0, False
    known = losses(alone.first)
    order = {point.step: number for number, point in enumerate(alone.first.points)}
    for reported_step, loss in losses(record).items():
        if reported_step in known:
            compared = True
            difference = abs(loss - known[reported_step])
            largest = max(largest, difference)
            if exact:
                continue  # the printed loss is an average since the start
            if not difference <= alone.tolerance and not (math.isnan(loss) and math.isnan(known[reported_step])):
                differs = order[reported_step] if differs is None else min(differs, order[reported_step])
    unused = alone.fine_losses and _all_losses_equal(known, losses(record))
    if alone.deterministic and from_step is not None:
        for rank, steps in enumerate(record.steps):
            for number, step in enumerate(steps):
                if (expected := at(alone.first, rank, from_step + number)) is None:
                    break
                compared = True
                # Use the second step after the restart: the first step's record may contain further inputs.
                other_inputs = not unused and number == 1 and reads_other(alone, rank, from_step + 1, step)
                same = (unused or close(step.weights, expected.weights, 1e-6 if alone.exact else 1e-4)) and not (
                    other_copies(alone, rank, from_step + number, steps[number : number + 2])
                )
                if other_inputs or not same:
                    differs = from_step + number if differs is None else min(differs, from_step + number)
                    break
    return Resumed(from_step, weighed, differs, largest, compared)


def _all_losses_equal(known: Mapping[int, float], own: Mapping[int, float]) -> bool:
    """Return whether a resumed attempt has enough losses to compare, and all of them are exactly equal.

    If so, different weights or inputs do not matter, as in federated learning.

    known: the losses of the undisturbed run.
    """
    same = {step: loss for step, loss in own.items() if step in known}
    return len({*same.values()}) >= SAME_LOSSES and all(known[step] == loss for step, loss in same.items())


def reads_other(alone: Undisturbed, rank: int, number: int, step: Step) -> bool:
    """Return whether a resumed step read different inputs than step `number` of the undisturbed run.

    Return False if the two undisturbed runs also differ.
    """
    one, other = at(alone.first, rank, number), at(alone.second, rank, number)
    return bool(one and other and step.batch and one.batch == other.batch != step.batch)


def other_variables(
    alone: Undisturbed, rank: int, number: int, steps: Sequence[Step]
) -> dict[str, tuple[float, float]]:
    """Return the program's variables that a resume did not restore, each with its wrong and its right value.

    Variables that differ between the undisturbed runs are skipped. A variable is returned only if it is wrong in two
    steps, because a program may set it late.

    steps: the resumed steps, starting with step `number`.
    """
    found = []
    for step, own in enumerate(steps[:2], number):
        one, other = at(alone.first, rank, step), at(alone.second, rank, step)
        if not one or not other:
            return {}
        found.append(
            {
                name: (own.variables[name], value)
                for name, value in one.variables.items()
                if name in own.variables
                and close(value, other.variables.get(name, math.nan))
                and not close(value, own.variables[name], 1e-4)
            }
        )
    return {name: values for name, values in found[0].items() if name in found[1]} if len(found) == 2 else {}


def other_copies(alone: Undisturbed, rank: int, number: int, steps: Sequence[Step]) -> list[str]:
    """Return the names of copies of the weights, such as an EMA, that are wrong although the weights are right.

    steps: the resumed steps, starting with step `number`.
    """
    known = at(alone.first, rank, number)
    if not known or not steps or not close(steps[0].weights, known.weights, 1e-4):
        return []
    found = other_variables(alone, rank, number, steps)
    # A program may keep its best weights in a file, and read this file only at its end.
    return [name.removeprefix(COPY) for name in found if name.startswith(COPY) and "best" not in name]


def losses(record: Record) -> dict[int, float]:
    """Return the reported loss of each step."""
    return {point.step: point.loss for point in record.points if point.loss is not None}


def at(record: Record, rank: int, number: int) -> Step | None:
    """Return what a rank recorded just before its step `number`, or None if it recorded nothing."""
    steps = record.steps[rank] if rank < len(record.steps) else ()
    return steps[number] if 0 <= number < len(steps) else None


def close(a: float, b: float, relative: float = EQUAL) -> bool:
    """Return whether two numbers are equal, except for rounding. relative: the allowed relative difference."""
    return math.isclose(a, b, rel_tol=relative, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))


def values(record: Record, name: str) -> Mapping[int, float]:
    """Return the reported value called `name` of each step that has one."""
    return {point.step: point.values[name] for point in record.points if name in point.values}


def _from_step(first: Record, record: Record) -> int | None:
    """Return how many steps the loaded checkpoint contains, or None if that is unknown.

    The result follows from the first step that the attempt reported.
    """
    for point in record.points:
        same = next((number for number, one in enumerate(first.points) if one.step == point.step), None)
        if same is None:
            continue
        if not (record.steps and first.steps):
            return same
        from_step = before(first, first.points[same]) - before(record, point)
        return from_step if from_step >= 0 else None  # a negative number counts something other than steps
    return None


def before(record: Record, point: Point) -> int:
    """Return how many steps were complete when the program reported `point`."""
    if not record.steps:
        return next(number for number, one in enumerate(record.points) if one is point)
    steps = record.steps[min(record.reporter, len(record.steps) - 1)]
    return sum(step.time < point.time if point.time else step.at < point.at for step in steps)


def _repeats(first: Record, record: Record, from_step: int) -> bool:
    """Return whether the first step that an attempt reports is earlier than `from_step`."""
    known = {point.step: point for point in first.points}
    return any(before(first, known[point.step]) < from_step for point in record.points[:1] if point.step in known)


def _same_weights(alone: Undisturbed, record: Record, from_step: int) -> bool:
    """Return whether a resumed attempt has exactly the weights of the undisturbed run at each of several steps."""
    pairs = [
        (step.weights, expected.weights)
        for rank, steps in enumerate(record.steps)
        for number, step in enumerate(steps, from_step)
        if (expected := at(alone.first, rank, number))
    ]
    return len(pairs) > AFTER_STEPS and all(own == expected for own, expected in pairs)


def _by_weights(alone: Undisturbed, record: Record) -> int | None:
    """Return the step of the undisturbed run that has the loaded weights, or None if this is unknown."""
    own = at(record, 0, 0)
    if own is None or not alone.first.steps or not alone.deterministic:
        return None
    steps = alone.first.steps[0]
    equal = [number for number, step in enumerate(steps) if close(step.weights, own.weights, 1e-9)]
    if len(equal) > 1:  # a warm-up starts with lr 0, so its first steps have equal weights
        equal = [n for n in equal if steps[n].states == own.states and close(steps[n].state_sum, own.state_sum, 1e-9)]
    return equal[0] if len(equal) == 1 else None
