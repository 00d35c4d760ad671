"""Records whether a program calls hpcinit.init() and run.wrap(), and which options have no effect without them.

Rank 0 writes program_use.json before the program starts, and again in hpcinit.init() and in run.wrap(). So the record
is correct even if the program is killed or replaces its process.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hpcinit.base import safe_files
from hpcinit.records import run_folder
from hpcinit.records.layout import Layout
from hpcinit.records.spec import MLFLOW, Comm, Hang, Samples, Spec, Training
from hpcinit.records.stop_reasons import Stopping

# What the program has called: nothing yet, hpcinit.init(), or run.wrap() as well.
STEPS = NOTHING, INIT, WRAP = "nothing", "init", "wrap"
_MISSING = {NOTHING: "the program did not use hpcinit", INIT: "the program did not call run.wrap"}
_ADVICE = {
    NOTHING: "call hpcinit.init() and run.wrap() in the program, or omit these options",
    INIT: "call run.wrap() in the program, or omit these options",
}


@dataclass(frozen=True)
class ProgramUse:
    """The content of program_use.json.

    uses: which of hpcinit's functions the program has called: NOTHING, INIT or WRAP.
    no_effect: the options that have no effect.
    """

    uses: str
    no_effect: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Return a sentence about the options that had no effect and why, or '' if there are none."""
        return f"{_MISSING[self.uses]}: {', '.join(self.no_effect)} had no effect" if self.no_effect else ""

    @property
    def advice(self) -> str:
        """Return what the user should change so that the options have an effect, or ''."""
        return _ADVICE[self.uses] if self.no_effect else ""


def of_spec(spec: Spec, uses: str) -> ProgramUse:
    """Return the record for a program. Options with their default values are not listed as ineffective.

    uses: which of hpcinit's functions the program has called so far: NOTHING, INIT or WRAP.
    """
    found = {NOTHING: _of_init, INIT: _of_wrap}.get(uses)
    return ProgramUse(uses, tuple(found(spec)) if found else ())


def start(folder: Path, spec: Spec) -> None:
    """Write the first record, just before the program starts."""
    _write(folder, of_spec(spec, NOTHING))


def advance(folder: Path, use: ProgramUse) -> None:
    """Replace the record after the program called init() or run.wrap(), unless it already shows a later call."""
    found = read(folder)
    if found and STEPS.index(found.uses) < STEPS.index(use.uses):
        _write(folder, use)


def _write(folder: Path, use: ProgramUse) -> None:
    """Write the record. If the disk is full, remove the earlier record, because it is wrong now."""
    path = folder / run_folder.PROGRAM_USE
    try:
        safe_files.write_atomically(path, json.dumps(asdict(use)) + "\n")
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()


def read(folder: Path) -> ProgramUse | None:
    """Return the record of the run in `folder`, or None if it is missing or invalid."""
    found = run_folder.read_record(ProgramUse, folder / run_folder.PROGRAM_USE)
    return found if found and found.uses in STEPS else None


def _of_init(spec: Spec) -> Iterator[str]:
    """Yield the options that need hpcinit.init()."""
    usual = Layout().over(spec.world_size, spec.ranks_in_a_row)
    if spec.layout != usual or spec.training.wrap != Training.wrap:
        yield "parallel"
    if spec.batch != Samples():
        yield "batch"
    yield from _of_training(spec)
    for name in ("seed", "seed_by", "deterministic"):
        if getattr(spec, name) != getattr(Spec, name):
            yield name
    own = ("backend", "collective_timeout_s", "device_id", "checkpoint_timeout_s")
    yield from _changed("comm", spec.comm, Comm(), own)
    if spec.comm.deepspeed and not spec.training.wrapper.needs_deepspeed:
        yield "comm.deepspeed"
    yield from _changed("stop", spec.stop, Stopping(), ("margin_s", "every_steps"))
    if spec.tracker == MLFLOW:
        yield "tracker"
    yield from _changed("hang", spec.hang, Hang(), tuple(each.name for each in fields(Hang)))


def _of_wrap(spec: Spec) -> Iterator[str]:
    """Yield the options that need run.wrap(). parallel.wrap=deepspeed does not need it, because init() uses it."""
    if spec.training.wrap != Training.wrap and not spec.training.wrapper.needs_deepspeed:
        yield "parallel.wrap"
    yield from _of_training(spec)


def _of_training(spec: Spec) -> Iterator[str]:
    usual = Training()
    for name in ("compile", "gradient_clip", "precision", "activation_checkpointing"):
        if getattr(spec.training, name) != getattr(usual, name):
            yield name


def _changed(group: str, value: object, usual: object, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if getattr(value, name) != getattr(usual, name):
            yield f"{group}.{name}"
