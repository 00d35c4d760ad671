"""Finds the problems of a resume, and their probable causes.

There is a finding if losses or weights differ, or if the attempt starts at a wrong step. The other values that the
ranks recorded (learning rates, optimizer state, inputs, random states) show the cause.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from hpcinit.base.text import counted
from hpcinit.drill import faults
from hpcinit.drill.attempt import Record, Save, file_size, kinds
from hpcinit.drill.comparison import (
    Resumed,
    Undisturbed,
    at,
    before,
    close,
    other_copies,
    other_variables,
    reads_other,
    values,
)
from hpcinit.drill.faults import Interruption
from hpcinit.records import drill_records
from hpcinit.records.drill_records import Step

LEAST_S = 0.25  # a program that runs for at least this long after SIGTERM, and then ends normally, ignores the signal
SMALL_FILE = 1024  # a file that names the latest checkpoint has at most this many bytes
MOST_NAMES, MOST_VARIABLES = 3, 2
POINTER = re.compile(r"(?i)latest|last|newest|current|resume|pointer")  # the name of a file that names a checkpoint
IN_TMPDIR = re.compile(r"/attempt-\d+/tmp/")  # a file in the TMPDIR of an attempt
WRONG_START = "the program resumes with a wrong epoch number"
NO_STEP = "read a batch that no step of the undisturbed run read"
# What torch, pickle, safetensors and json print about an incomplete file.
DAMAGED = re.compile(
    r"PytorchStreamReader|failed finding central directory|EOFError|Ran out of input|UnpicklingError|data was truncated"
    r"|IncompleteMetadata|HeaderTooLarge|SafetensorError|JSONDecodeError|BadZipFile|not a ZIP archive|unexpected EOF"
)

LOADS_NOTHING, WRONG_FILE, WEIGHTS = "loads_nothing", "wrong_file", "weights"
OPTIMIZER, SCHEDULER, RANDOM_STATE = "no_optimizer", "no_scheduler", "no_random_state"
AVERAGES, ACCUMULATION = "no_averages", "lost_gradients"
DATA, EPOCH, TORN, LATEST = "data_from_start", "epoch_counter", "torn_checkpoint", "latest_before_data"
IGNORES_SIGNAL, SHARDED, NODE_LOCAL = "ignores_signal", "sharded_rank_0_only", "node_local"
CRASH, UNKNOWN, SAVES_NOTHING = "resume_fails", "unknown", "saves_nothing"

ADVICE = {
    LOADS_NOTHING: "before the first step, look for the checkpoint in the folder to which the program saves it",
    WRONG_FILE: "load the newest complete checkpoint: compare step numbers as numbers, not as text",
    WEIGHTS: "load the saved state_dict() into the same model that you train, after you create it",
    OPTIMIZER: "save optimizer.state_dict(), and load it after you load the model",
    SCHEDULER: "save scheduler.state_dict() and load it, or compute the learning rate from the step number",
    ACCUMULATION: "save only after a step of the optimizer: a checkpoint contains no accumulated gradients",
    AVERAGES: "save the averaged weights (EMA), and load them",
    RANDOM_STATE: "save and restore the random states of torch, numpy and random on each rank",
    DATA: "set the sampler's epoch and position, or save the loader's state: docs/long-runs",
    EPOCH: "save the epoch (or compute it from the step), and call sampler.set_epoch() with it",
    TORN: "write into a temporary file and rename it, and skip a checkpoint that is incomplete",
    LATEST: "write the name of the latest checkpoint only after its data is complete",
    IGNORES_SIGNAL: "save and exit when SIGTERM arrives: check run.should_stop(), or a flag that your handler sets",
    SHARDED: "let each rank save its own part of a sharded state, or use torch.distributed.checkpoint",
    NODE_LOCAL: "save to a folder that all nodes share; the next attempt runs on other nodes",
    CRASH: "start the program in the folder of an interrupted run to see the whole error",
    UNKNOWN: "to find the cause, report more values with run.progress(step, total, loss=..., lr=...)",
    SAVES_NOTHING: "save a checkpoint every few minutes",
}


@dataclass(frozen=True)
class Finding:
    """A problem that the drill found. cause: a key of ADVICE. text: a description of what the drill observed."""

    cause: str
    text: str

    @property
    def advice(self) -> str:
        """Return what the user should change."""
        return ADVICE[self.cause]


def interruption_findings(alone: Undisturbed, cut: Interruption, stops: bool = False) -> Iterator[Finding]:
    """Yield a finding if the interrupted attempt ignored SIGTERM.

    stops: whether the program has obeyed an earlier SIGTERM. If so, this attempt may just be in its last epoch.
    """
    if cut.signal in ("caught", "ignored"):
        after = cut.done - cut.at
        # A short program may end before the signal arrives, and a slow exit is not a further step.
        if after > 1 and (cut.ran_on or (cut.done >= alone.first.done and cut.after_s > LEAST_S and not stops)):
            yield Finding(
                IGNORES_SIGNAL,
                f"SIGTERM is {cut.signal}: the program made {counted(after, 'more step')} instead of stopping",
            )


def resume_findings(alone: Undisturbed, cut: Interruption, record: Record, found: Resumed) -> list[Finding]:
    """Return the findings about a resume.

    alone: the undisturbed run.
    cut: the attempt that the fault ended.
    record, found: the results of the next attempt, and their comparison with the undisturbed run.
    """
    findings = [
        *_error_findings(cut, record),
        *_place_findings(alone, cut, record, found),
        *_start_findings(alone, cut, record, found),
    ]
    if not findings or findings[0].cause == WRONG_FILE:
        findings += [_with_variables(one, alone, record, found) for one in _state_findings(alone, record, found)]
    if not findings:
        findings += _length_findings(alone, cut, record, found)
    if not findings and found.differs is not None:
        text = f"losses or weights differ from step {found.differs + 1} on, by up to {found.largest:.3g}"
        findings = [_with_variables(Finding(UNKNOWN, text), alone, record, found)]
    if cut.fault in (faults.WHILE_SAVING, faults.FULL_DISK) and findings and not _skipped(cut, record, found):
        return [_unfinished_save_finding(cut, findings[0])]
    return findings


def _skipped(cut: Interruption, record: Record, found: Resumed) -> bool:
    """Return whether the attempt used no file of the interrupted save."""
    return found.from_step == newest(cut.saves) and {*cut.unfinished, *cut.expected}.isdisjoint(record.read)


def _with_variables(finding: Finding, alone: Undisturbed, record: Record, found: Resumed) -> Finding:
    """Return the finding with the program's variables that the resume did not restore."""
    from_step, start = found.state_step, at(alone.first, 0, 0)
    if from_step is None or not record.steps or not start:
        return finding
    others = other_variables(alone, 0, from_step, record.steps[0])
    # A variable that does not change in the undisturbed runs may count the steps of this process.
    changed = {
        name: one
        for name, one in others.items()
        if one[1] != start.variables.get(name) and not name.startswith(drill_records.COPY)
    }
    order = sorted(changed, key=lambda name: (changed[name][0] != start.variables.get(name), len(name)))
    shown = [f"{name} is {changed[name][0]:.6g} instead of {changed[name][1]:.6g}" for name in order[:MOST_VARIABLES]]
    return replace(finding, text="; ".join([finding.text, *shown]))


def _error_findings(cut: Interruption, record: Record) -> Iterator[Finding]:
    if record.status:
        error = record.error or f"exit status {record.status}"
        failed_rank = error.removeprefix("rank ").partition(":")[0]
        cause = SHARDED if failed_rank.isdigit() and int(failed_rank) and _is_missing(error) else CRASH
        cause = TORN if DAMAGED.search(error) else cause
        cause = (
            NODE_LOCAL if IN_TMPDIR.search(error) or any(name in error for name in _elsewhere(cut.record)) else cause
        )
        yield Finding(cause, f"the next attempt failed: {error.splitlines()[-1][:200]}")


def _is_missing(error: str) -> bool:
    return "No such file" in error or "not found" in error.lower()


def _place_findings(alone: Undisturbed, cut: Interruption, record: Record, found: Resumed) -> Iterator[Finding]:
    if found.from_step != 0 or record.status:
        return
    elsewhere = _elsewhere(cut.record) or _elsewhere(alone.first)
    here = max((save.largest for save in cut.saves), default=0)
    if elsewhere and max(elsewhere.values()) > here:
        places = ", ".join(list(elsewhere)[:MOST_NAMES])
        yield Finding(NODE_LOCAL, f"the program saves to {places}, which the next attempt cannot read")
    elif not alone.saves:
        yield Finding(SAVES_NOTHING, "the program wrote no checkpoint")


def _elsewhere(record: Record) -> dict[str, int]:
    """Return the files that an attempt left in node-local folders, with their sizes."""
    found = {f"$TMPDIR/{name}": size for name, size in record.left_in_tmp.items() if size}
    return found | {str(one["path"]): int(str(one["bytes"])) for one in record.outside if one.get("bytes")}


def _length_findings(alone: Undisturbed, cut: Interruption, record: Record, found: Resumed) -> Iterator[Finding]:
    """Yield a finding if the attempt ended without an error after too many or too few steps."""
    if record.status != 0 or cut.fault == faults.FEWER_RANKS or alone.first.done != alone.second.done:
        return
    total = alone.first.done
    if record.done == 0 and cut.done < total - 1:
        yield Finding(EPOCH, f"the program ended without a step, although {counted(total - cut.done, 'step')} remained")
    elif found.by_weights is not None and abs(found.by_weights + record.done - total) > 1:
        made = found.by_weights + record.done
        yield Finding(EPOCH, f"the program made {counted(made, 'step')} in total, instead of {total}")


def _start_findings(alone: Undisturbed, cut: Interruption, record: Record, found: Resumed) -> Iterator[Finding]:
    """Yield a finding if the attempt started at a wrong step."""
    if record.status or found.from_step is None or not cut.saves:
        return
    latest = cut.saves[-1]
    read = [name for name in record.read if any(name in save.files for save in cut.saves)]
    weights = found.by_weights
    if found.from_step == 0 and weights:
        if weights >= _epoch_length(alone):  # otherwise, the program may read the first epoch again
            yield Finding(
                EPOCH, f"the weights are those after step {weights}, but the program counts from the start again"
            )
    elif found.from_step == 0:
        seen = f"it read {_names(read)}, but" if read else "the program loaded nothing, although"
        left = _names(list(latest.files))
        yield Finding(LOADS_NOTHING, f"started again at step 0; {seen} {left} of step {latest.steps} existed")
    elif weights == 0:
        yield Finding(WEIGHTS, f"the program counts from step {found.from_step}, but its weights are newly initialized")
    else:
        from_step = min(found.from_step, found.from_step if weights is None else weights)
        newer = _newer(cut.saves, read, from_step)
        if newer:
            from_file = f"read {_names(read)} of" if read else "continued from"
            yield Finding(
                WRONG_FILE,
                f"{from_file} step {from_step}, but {_names(list(newer.files))} of step {newer.steps} is newer",
            )


def _newer(saves: Sequence[Save], read: Sequence[str], from_step: int) -> Save | None:
    """Return the newest save if it is newer than `from_step`, and the program could have read it instead.

    read: the files of saves that the program read.
    """
    sizes = {name: size for save in saves for name, size in save.files.items() if name in read}

    def is_alike(name: str, size: int) -> bool:
        return kinds([name]) <= kinds(sizes) or any(0.8 * size <= other <= 1.25 * size for other in sizes.values())

    found = [
        save
        for save in saves
        if save.steps > from_step + 1 and (not read or any(is_alike(*one) for one in save.files.items()))
    ]
    # A save in the background is complete some steps later, and a second file of it even later.
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return found[-1] if found and largest not in found[-1].files else None


def _state_findings(alone: Undisturbed, record: Record, found: Resumed) -> Iterator[Finding]:
    """If losses or weights differ, yield a finding about the part of the state that was not restored."""
    from_step = found.state_step
    if found.differs is None or from_step is None:
        return
    pairs = [(at(record, rank, 0), at(alone.first, rank, from_step)) for rank in range(alone.world_size)]
    both = [(own, expected) for own, expected in pairs if own and expected]
    lost = [
        rank
        for rank, (own, expected) in enumerate(both)
        if alone.deterministic and not close(own.weights, expected.weights)
    ]
    if lost and (0 not in lost or _one_rank_saved(alone)):
        yield Finding(
            SHARDED, f"the weights of rank {', '.join(map(str, lost or [1]))} are not those of step {from_step}"
        )
        return
    if lost:
        yield Finding(WEIGHTS, f"the weights are not those after step {from_step}")
        return
    causes = [*_optimizer_findings(alone, record, both, from_step)]
    if not causes and found.by_weights in (
        None,
        found.from_step,
    ):  # otherwise the program numbers its steps differently
        causes += _reported_rate_findings(alone, record)
    causes = causes or _average_findings(alone, record.steps, from_step)
    # Inputs may depend on other state. In a GAN, the first model's optimizer changes the second model's inputs. A loss
    # may get inputs from a teacher with averaged weights.
    causes += [
        one
        for one in _data_findings(alone, record, both, from_step, found)
        if not (causes and one.text.endswith(NO_STEP))
    ]
    # A program may compute the learning rate from the epoch.
    if causes and causes[0].cause == SCHEDULER and _starts_with_other_data(alone, both, from_step):
        text = f"{WRONG_START}: the learning rate and the first batch are not those of step {from_step + 1}"
        causes.insert(0, Finding(EPOCH, text))
    elif [one.cause for one in causes] == [SCHEDULER, DATA] and (rate := _first_rate(alone, record, 0, from_step)):
        # If the rate was right at first, the wrong epoch of the data has changed it.
        causes = causes[rate[0] > from_step + 1 :]
    causes.sort(key=lambda one: one.cause != EPOCH)
    if not causes and (
        fewer := next(((own, expected) for own, expected in both if own.inputs < expected.inputs), None)
    ):
        # An evaluation before the step can only add inputs.
        seen = f"{fewer[0].inputs} inputs instead of {fewer[1].inputs}"
        causes = [Finding(ACCUMULATION, f"the first step had {seen}: it lacks gradients from before the save")]
    if not causes and any(_other_random(alone, rank, own, from_step) for rank, (own, _) in enumerate(both)):
        causes = [
            Finding(
                RANDOM_STATE,
                f"the random state is not that of step {from_step}, and losses differ from step {found.differs + 1} on",
            )
        ]
    yield from causes


def _one_rank_saved(alone: Undisturbed) -> bool:
    """Return whether the ranks have different weights. If so, rank 0 may have saved only its part of the model."""
    first = [steps[0].weights for steps in alone.first.steps if steps]
    return len(first) > 1 and not all(close(one, first[0]) for one in first)


def _optimizer_findings(
    alone: Undisturbed, record: Record, both: Sequence[tuple[Step, Step]], from_step: int
) -> Iterator[Finding]:
    for rank, (own, expected) in enumerate(both):
        rate = _first_rate(alone, record, rank, from_step)
        if own.states < expected.states:
            # The learning rate is in the optimizer's state, and a scheduler may continue from it.
            had = f"had {own.states} of {expected.states} tensors" if own.states else "was empty"
            which = f"the optimizer's state of rank {rank}" if rank else "the optimizer's state"
            yield Finding(
                SHARDED if rank else OPTIMIZER,
                f"{which} {had} at the first step, so the loss jumps and then recovers slowly",
            )
        elif rate:
            yield Finding(SCHEDULER, f"the learning rate at step {rate[0]} is {rate[1]:.4g} instead of {rate[2]:.4g}")
        elif alone.deterministic and not close(own.state_sum, expected.state_sum, 1e-4):
            cause = SHARDED if rank else OPTIMIZER
            yield Finding(cause, f"rank {rank}: the optimizer's state is not that of step {from_step}")
        else:
            continue
        return


def _average_findings(alone: Undisturbed, resumed: Sequence[Sequence[Step]], from_step: int) -> list[Finding]:
    """Return a finding if averaged weights, such as an EMA, are wrong although the weights are right.

    resumed: the steps of each rank from `from_step` on.
    """
    for rank, steps in enumerate(resumed):
        for index, own in enumerate(steps):
            number = from_step + index
            expected = at(alone.first, rank, number)
            if expected is None or not close(own.weights, expected.weights, 1e-4):
                break
            if copies := other_copies(alone, rank, number, steps[index : index + 2]):
                what = f"the tensors in {', '.join(copies)} at step {number + 1} of rank {rank}"
                text = f"{what} are not those of the undisturbed run"
                return [Finding(SHARDED if rank else AVERAGES, text)]
    return []


def _reported_rate_findings(alone: Undisturbed, record: Record) -> list[Finding]:
    """Return a finding if the program reports a wrong learning rate."""
    own, expected = values(record, "lr"), values(alone.first, "lr")
    step = next((step for step in own if step in expected and not close(own[step], expected[step], 1e-3)), None)
    if step is None:
        return []
    return [
        Finding(SCHEDULER, f"the program reports the learning rate {own[step]:.4g} instead of {expected[step]:.4g}")
    ]


def _first_rate(alone: Undisturbed, record: Record, rank: int, from_step: int) -> tuple[int, float, float] | None:
    """Return the first step with a wrong learning rate, that rate, and the right rate, or None if all are right.

    A wrong rate may appear some steps after the resume, when the scheduler sets it.
    """
    for number, own in enumerate(record.steps[rank]):
        expected = at(alone.first, rank, from_step + number)
        for rate, other in zip(own.lr, expected.lr if expected else (), strict=False):
            if not close(rate, other, 1e-5):
                return from_step + number + 1, rate, other
    return None


def _data_findings(
    alone: Undisturbed, record: Record, both: Sequence[tuple[Step, Step]], from_step: int, found: Resumed
) -> Iterator[Finding]:
    own_epochs, epochs = values(record, "epoch"), values(alone.first, "epoch")
    shared = next((step for step in own_epochs if step in epochs), None)
    differs = shared if shared is not None and own_epochs[shared] != epochs[shared] else None
    # A difference below 1 is the position in the epoch: Transformers reports, for example, epoch 1.25.
    other = differs if differs is not None and abs(own_epochs[differs] - epochs[differs]) >= 1 else None
    longer = record.status in (0, None) and record.done + from_step > alone.first.done
    length = _epoch_length(alone)
    for rank, steps in enumerate(record.steps[: len(both)]):
        numbers = range(1, len(steps))
        after = next((one for one in numbers if reads_other(alone, rank, from_step + one, steps[one])), None)
        if after is None:
            continue
        own, number = steps[after], from_step + after
        read_at = [number for number, step in enumerate(alone.first.steps[rank]) if step.batch == own.batch]
        if after > 1 and not read_at:
            continue  # inputs that depend on the weights
        other_random = _other_random(alone, rank, steps[0], from_step)
        seeded = _seeded_by_epoch(alone, rank, other_random, from_step)
        again = [one for one in read_at if one < number]
        in_epoch = bool(length) and any((number - one) % length == 0 for one in read_at)
        first = read_at[0] + 1 if read_at else 0
        # The attempt started with the first batch of an epoch.
        new_epoch = bool(length) and (first - 1 - after) % length == 0
        restarted = bool(again) and not seeded and _restarted(alone, rank, steps[0], from_step, own, again[0])
        too_long = _too_long(steps, from_step, length)
        of_epoch = "" if other is None else f"epoch {own_epochs[other]:g} instead of {epochs[other]:g}"
        depends = f"the random state is not that of step {from_step}, and the data order depends on it"
        other_batch = f"step {number + 1} read step {first}'s batch, from another epoch"
        by_generator = f"step {number + 1} read other data, whose order depends on a generator created in each epoch"
        # The first row with a true condition counts.
        rows = (
            (of_epoch, EPOCH, f"{WRONG_START}: {of_epoch}"),
            (
                restarted,
                RANDOM_STATE,
                f"the random state and the data order of step {number + 1} are those of step {first}",
            ),
            (in_epoch, EPOCH, f"{WRONG_START}: {other_batch}"),
            (too_long, DATA, too_long),
            (longer and not (again and again[-1] > after), EPOCH, f"{WRONG_START}: it made too many steps"),
            (
                read_at and not again,
                EPOCH if new_epoch else DATA,
                f"step {number + 1} read the batch of step {first}: the program skipped data",
            ),
            (read_at, DATA, f"step {number + 1} read the batch of step {again[-1] + 1 if again else 0} again"),
            (seeded, EPOCH, f"{WRONG_START}: {by_generator}"),
            (other_random, RANDOM_STATE, depends),
            (True, DATA, f"step {number + 1} {NO_STEP}"),
        )
        yield next(Finding(cause, text) for applies, cause, text in rows if applies)
        return
    if differs is not None:
        yield Finding(EPOCH, f"epoch {own_epochs[differs]:g} instead of {epochs[differs]:g}")


def _too_long(steps: Sequence[Step], from_step: int, length: int) -> str:
    """Return a message if the attempt resumed inside an epoch and then read more batches than were left, else ''.

    length: the number of steps per epoch, or 0 if it is unknown.
    """
    made = next((number for number, step in enumerate(steps) if step.passes != steps[0].passes), len(steps))
    left = length - from_step % length if length and steps[0].passes else made
    return f"the program read {made} batches of its first epoch, but only {left} were left" if made > left else ""


def _starts_with_other_data(alone: Undisturbed, both: Sequence[tuple[Step, Step]], from_step: int) -> bool:
    """Return whether the first step read other data, although the random states were right."""
    return any(
        reads_other(alone, rank, from_step, own) and not _other_random(alone, rank, own, from_step)
        for rank, (own, _) in enumerate(both)
    )


def _other_random(alone: Undisturbed, rank: int, own: Step, number: int) -> list[str]:
    """Return the names of the random generators whose state is wrong.

    Generators that the program does not seed or does not use are skipped.

    own: what the rank recorded at its first step.
    number: the same step in the undisturbed runs.
    """
    start, one, other = at(alone.first, rank, 0), at(alone.first, rank, number), at(alone.second, rank, number)
    if not start or not one or not other:
        return []
    used = [name for name, value in one.rng.items() if other.rng.get(name) == value != start.rng.get(name)]
    notes = (drill_records.LOADER, drill_records.SHUFFLE)
    return [name for name in used if name not in notes and own.rng.get(name) != one.rng[name]]


def _restarted(alone: Undisturbed, rank: int, start: Step, from_step: int, own: Step, earlier: int) -> bool:
    """Return whether the random generators that decide the data order went back to an earlier step.

    start: what the rank recorded at its first step after the resume.
    own: what the rank recorded at the step with wrong data.
    earlier: the step at which the undisturbed run read these data.
    """
    lost, known = _other_random(alone, rank, start, from_step), at(alone.first, rank, earlier)
    if drill_records.LOADER in own.rng and drill_records.SHUFFLE not in own.rng:
        # Each loader draws a seed for its workers from torch's generator.
        lost = [name for name in lost if name != "torch"]
    names = {name for name in known.rng if name in lost or name.startswith(drill_records.OWN)} if known else set[str]()
    return bool(lost and known and names) and all(own.rng.get(name) == known.rng[name] for name in names if known)


def _seeded_by_epoch(alone: Undisturbed, rank: int, names: Sequence[str], number: int) -> bool:
    """Return whether the program creates one of these generators again during training, for example in each epoch.

    names: the generators whose state differs, from _other_random().
    number: a step of the undisturbed run.
    """
    start, one = at(alone.first, rank, 0), at(alone.first, rank, number)
    numbers = {one.generators[name] for name in names if name in one.generators} if one else set[int]()
    return bool(start and numbers - set(start.generators.values()))


def _epoch_length(alone: Undisturbed) -> int:
    """Return the number of steps per epoch, or 0 if it is unknown or varies.

    The epochs are those that the program reports, or else its passes over the data.
    """
    reported: dict[float, int] = {}  # the number of steps before the first line of each epoch
    for point in alone.first.points:
        if "epoch" in point.values:
            reported.setdefault(point.values["epoch"], before(alone.first, point))
    passes = [step.passes for step in alone.first.steps[0]] if alone.first.steps else []
    read = [passes.index(one) for one in sorted({*passes}) if one]
    whole = [*reported.values()] if all(one == int(one) for one in reported) else []
    for starts in (whole, read):
        lengths = {b - a for a, b in itertools.pairwise(starts)}
        if len(lengths) == 1:
            return lengths.pop()
    return 0


def _unfinished_save_finding(cut: Interruption, seen: Finding) -> Finding:
    """Return the finding for a resume that failed after an interrupted save.

    seen: the finding about the failed resume.
    """
    missing = [name for name, size in cut.expected.items() if cut.unfinished.get(name) != size]
    if cut.state:
        # A thread may write the data some steps after the pointer.
        pointers = [path for path in cut.state.rglob("*") if POINTER.search(path.name)]
        for path in [*(cut.state / name for name in cut.unfinished), *pointers]:
            if file_size(path) <= SMALL_FILE and _refers(path, missing):
                name = str(path.relative_to(cut.state))
                return Finding(
                    LATEST,
                    f"{_names([name])} referred to {_names(missing)} before the data was complete; {seen.text}",
                )
    return Finding(TORN, f"{_names(missing) or 'the save'} was incomplete; {seen.text}")


def _refers(path: Path, missing: Sequence[str]) -> bool:
    """Return whether a text file contains the name of a missing file, or of its folder.

    In a pointer file such as latest.json, a number in that name is enough.
    """
    try:
        text = str(path.readlink()) if path.is_symlink() else path.read_text().strip()
    except (OSError, ValueError):
        return False
    parts = {part for name in missing for part in PurePath(name).parts[1:]}
    numbers = {int(number) for part in parts for number in re.findall(r"\d+", part)}
    # {"step": 12} in latest.json, or a number in any file
    is_pointer = text.isdigit() or POINTER.search(path.name)
    named = {int(number) for number in re.findall(r"\d+", text)} if is_pointer else set[int]()
    return bool(named & numbers) or any(part in text for part in parts if len(part) > 3 and part != path.name)


def _names(paths: Sequence[str]) -> str:
    shown = [
        PurePath(path).name if len(PurePath(path).parts) < 3 else "/".join(PurePath(path).parts[-2:]) for path in paths
    ]
    return ", ".join(shown[:MOST_NAMES]) + (f" and {len(shown) - MOST_NAMES} more" if len(shown) > MOST_NAMES else "")


def newest(saves: Sequence[Save]) -> int:
    """Return the number of steps of the newest save, or 0 if there is no save."""
    return saves[-1].steps if saves else 0
