"""Saves a checkpoint of all ranks, at once or in the background, and loads the newest complete checkpoint."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcinit.base.console import say
from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.base.versions import installed
from hpcinit.records import wrappers
from hpcinit.records.layout import Layout
from hpcinit.records.startup_timeout import CHECKPOINT_S
from hpcinit.train.checkpoint import background_save, checkpoint_folder, native_checkpoint, random_state
from hpcinit.train.checkpoint import checkpoint_folder as of_steps
from hpcinit.train.checkpoint import owner as owners
from hpcinit.train.checkpoint import random_state as of_data
from hpcinit.train.checkpoint.background_save import BackgroundSaves
from hpcinit.train.checkpoint.checkpoint_folder import Description, Unfinished
from hpcinit.train.checkpoint.staged_files import StagedFiles
from hpcinit.train.wrap.wrapped import Wrapped

__all__ = ["CheckpointError", "Loaded", "load", "save"]

TIMEOUT = timedelta(seconds=CHECKPOINT_S)


@dataclass(frozen=True)
class Loaded:
    """What load() restored, apart from the model and the optimizer.

    Attributes:
        step: the saved step.
        samples: how many samples all ranks together had processed by that step.
        extra: the value of `extra` that was passed to save().
        loader: whether the loader's position was restored. If not, skip the first `samples` samples of the whole data
            set. It is False if no position was saved, if load() got no loader, or if the number of shares of the data
            has changed.
        random: whether the states of the random generators were restored. It is False if the layout has changed. The
            generators are then seeded again, see random_state.
    """

    step: int
    samples: int
    extra: Any
    loader: bool
    random: bool


def save(
    wrapped: Wrapped,
    folder: Path,
    step: int,
    *,
    layout: Layout,
    seed: int,
    loader: of_data.Stateful | None = None,
    extra: Any = None,
    samples: int | None = None,
    keep: int | None = None,
    timeout: timedelta = TIMEOUT,
    job: str = "",
    wait: bool = True,
) -> Path:
    """Save the state after `step` optimizer steps as a checkpoint, and return its folder. Every rank must call it.

    Args:
        wrapped: the model and optimizer, as run.wrap() returned them.
        folder: a folder that all nodes share.
        step: number of finished optimizer steps.
        extra: plain values and tensors, such as a schedule's state_dict(). Rank 0's value is saved.
        samples: number of samples processed so far; None: step x global batch.
        keep: number of checkpoints to keep; older ones are removed in the background. None: keep all.
        timeout: how long ranks wait for each other.
        job: World.job. It shows which of a job's attempts is the latest. Only rank 0's value is used.
        wait: if False, return as soon as the state is copied into memory. See Runtime.save.

    Raises RequestError if something cannot be saved or if another job is now using the folder. Raises CheckpointError
    if writing fails. In both cases, existing checkpoints are unchanged.
    """
    of_data.check_loader(loader)
    if keep is not None and keep < 1:
        raise RequestError(f"keep is {keep}, expected 1 or more, or None to keep all")
    wrapped.refuse_offloaded("save()")
    if not wrapped.between_steps:
        raise RequestError(
            "save() during gradient accumulation would lose gradients; call it after step() returned True"
        )
    of_steps.name(step)  # raises RequestError for a negative step
    described = _describe(wrapped, step, wrapped.batch.total * step if samples is None else samples, layout, seed)
    wait = wait or wrapped.checkpoint_format != wrappers.TORCH_FORMAT  # DeepSpeed writes its files itself
    saves = None if wait else background_save.of_this_process()
    with native_checkpoint.patient(timeout):
        background_save.finish(timeout / 2)
        return _save(wrapped, folder, described, layout, loader, extra, job, timeout, keep, saves)


def _save(
    wrapped: Wrapped,
    folder: Path,
    described: dict[str, Any],
    layout: Layout,
    loader: of_data.Stateful | None,
    extra: Any,
    job: str,
    timeout: timedelta,
    keep: int | None,
    saves: BackgroundSaves | None,
) -> Path:
    step, timeout_s = described["step"], timeout.total_seconds()
    unfinished: Unfinished | None = None

    def begin() -> Unfinished | None:
        try:
            return of_steps.begin(folder, step, owners.of_this_process(job), removals_s=timeout_s / 2)
        except OSError as error:
            if saves is None or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            left = of_steps.what_is_left(folder)  # a full disk is a warning here as it is in a writer
            say(f"warning: cannot save step {step} in {folder}: {error}; {left}; training continues")
            return None

    def publish() -> Path:
        assert unfinished is not None
        return of_steps.publish(
            unfinished, Description(**described, files=files, save=unfinished.save, owner=unfinished.owner)
        )

    try:
        unfinished = native_checkpoint.on_rank_0(begin)
        if unfinished is None:
            return folder / of_steps.name(step)
        path = unfinished.path
        if saves is not None and _start_saving(wrapped, unfinished, described, layout, loader, extra, saves, keep):
            return folder / of_steps.name(step)
        rank, written = dist.get_rank(), _write(wrapped, path, layout, loader, extra)
        told = native_checkpoint.everywhere(lambda: of_steps.files_of(path, written, rank))
        files = {name: file for each in told for name, file in each.items()}
        final = native_checkpoint.on_rank_0(publish)
    except CheckpointError as error:
        winner = owners.taken_by(folder, unfinished.owner) if unfinished else None
        text = _undone(folder, unfinished, step, error)
        if unfinished and winner:  # the new owner may have removed the unfinished step; a restart would not help
            lost = owners.lost(folder, unfinished.owner, winner)
            raise RequestError(f"{text}; {lost}", quoted=error.quoted) from error
        raise CheckpointError(text, quoted=error.quoted) from error
    except RequestError:
        _clear(unfinished)
        raise
    if keep is not None and dist.get_rank() == 0:
        checkpoint_folder.remove_later(partial(of_steps.prune, folder, keep))
    return final


def _start_saving(
    wrapped: Wrapped,
    unfinished: Unfinished,
    described: dict[str, Any],
    layout: Layout,
    loader: of_data.Stateful | None,
    extra: Any,
    saves: BackgroundSaves,
    keep: int | None,
) -> bool:
    """Copy the state into memory, and make the writer processes save it. Return False if this fails on any rank."""
    problem = saves.start()
    names = _write(wrapped, unfinished.path, layout, loader, extra, saves.staged)
    problems = native_checkpoint.everywhere(lambda: problem or saves.staged.problem())
    if problem := next(filter(None, problems), ""):
        saves.staged.free()
        if dist.get_rank() == 0:
            say(f"step {described['step']} is saved as with wait=True: {problem}")
        return False
    saves.hand_over(unfinished, described, names, dist.get_rank(), keep)
    return True


def load(
    wrapped: Wrapped,
    folder: Path,
    *,
    layout: Layout,
    loader: of_data.Stateful | None = None,
    seed_by: str = "same",
    timeout: timedelta = TIMEOUT,
    job: str = "",
) -> Loaded | None:
    """Load the newest complete checkpoint into a model that run.wrap() returned. Return None if there is none.

    Every rank must call it. First, the ranks check the checksums of all files. Each file is read by one rank. If a
    checkpoint is damaged, print a message and use the one before it. The number of ranks and the layout may differ from
    those of the saving run. A checkpoint of ddp can be loaded with fsdp, and the reverse; no other change of the
    wrapper is possible. Random numbers continue as without an interruption, unless a DataLoader draws from torch's
    default generator at its start. To avoid that, create it with the options from run.loader_options().

    Args:
        wrapped: the model and optimizer, as run.wrap() returned them.
        folder: the folder that was passed to save().
        seed_by: 'same', 'rank' or 'data': how generators are seeded if the layout has changed.
        timeout, job: as in save().

    Raises RequestError if the checkpoint does not match the model, and CheckpointError if it cannot be read.
    """
    of_data.check_loader(loader)
    wrapped.refuse_offloaded("load()")
    with native_checkpoint.patient(timeout):
        background_save.finish(timeout / 2)
        found = _newest(folder, job, timeout)
        if found is None:
            return None
        path, saved = found
        _check(wrapped, path, saved)
        wrapped.load_files(path, saved, layout)
        work = partial(_of_program, wrapped, loader, layout, path, saved, seed_by)
        return native_checkpoint.everywhere(work)[dist.get_rank()]


def _newest(folder: Path, job: str, timeout: timedelta) -> tuple[Path, Description] | None:
    """Return the newest step whose files are undamaged. The result is the same on every rank."""
    say_once = cache(say)

    def newest() -> tuple[Path, Description] | None:
        return of_steps.newest(folder, say_once)

    def first() -> tuple[Path, Description] | None:
        checkpoint_folder.wait_for_removals(
            timeout.total_seconds() / 2
        )  # a folder that is being removed must not be found
        owner = owners.of_this_process(job)
        with suppress(OSError):  # the folder may be missing, or read-only for this job
            owners.claim_after_restart(folder, owner)
            if os.access(folder, os.W_OK):
                of_steps.sweep(folder, owner)
        return newest()

    found = native_checkpoint.on_rank_0(first)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    while found is not None:
        wrong = next(filter(None, native_checkpoint.everywhere(partial(of_steps.damage, *found, rank, ranks))), None)
        if wrong is None:
            break
        of_steps.remember_damage(*found, wrong)
        found = native_checkpoint.on_rank_0(newest)  # prints that it skips the damaged step
    return found


def _of_program(
    wrapped: Wrapped, loader: of_data.Stateful | None, layout: Layout, path: Path, saved: Description, seed_by: str
) -> Loaded:
    own = of_data.load_plain(path / of_data.EXTRA)
    if wrapped.scaler is not None and own["scaler"]:
        wrapped.scaler.load_state_dict(own["scaler"])
    placed = _place(loader, layout, path, saved)
    drawn = random_state.load_random_state(
        path, saved, layout, seed_by
    )  # last, because the calls above may draw random numbers
    return Loaded(saved.step, saved.samples, own["extra"], placed, drawn)


def _describe(wrapped: Wrapped, step: int, samples: int, layout: Layout, seed: int) -> dict[str, Any]:
    versions = {"torch": str(torch.__version__)}
    if wrapped.zero_stage is not None:
        versions["deepspeed"] = installed("deepspeed")
    return {
        "step": step,
        "samples": samples,
        "wrap": wrapped.checkpoint_format,
        "world_size": dist.get_world_size(),
        "layout": layout.degrees(),
        "data_parallel": layout.data_parallel,
        "seed": seed,
        "zero_stage": wrapped.zero_stage,
        "versions": versions,
    }


def _write(
    wrapped: Wrapped,
    folder: Path,
    layout: Layout,
    loader: of_data.Stateful | None,
    extra: Any,
    staged: StagedFiles | None = None,
) -> list[str]:
    """Write this rank's files into `folder` or `staged`, and return their names.

    Write the program's own values first, because they are small, and saving them is most likely to fail.
    """
    rank = dist.get_rank()

    def write(name: str, content: bytes) -> None:
        if staged is None:
            of_steps.write(folder / name, content)
        else:
            staged.write(name, content)

    def of_program() -> list[str]:
        files = random_state.save_random_state(rank, write) + of_data.save_loader_state(loader, layout, rank, write)
        if rank == 0:
            own = {"extra": extra, "scaler": {} if wrapped.scaler is None else wrapped.scaler.state_dict()}
            files += of_data.save_plain(own, of_data.EXTRA, write, "extra")
        return files

    written = native_checkpoint.everywhere(of_program)[rank]
    # Collective: if it fails on one rank, all raise CheckpointError.
    return written + wrapped.save_files(folder, staged)


def _undone(folder: Path, unfinished: Unfinished | None, step: int, error: CheckpointError) -> str:
    left = of_steps.what_is_left(folder)
    _clear(unfinished)
    return f"cannot save step {step} in {folder}: {error}; {left}"


def _clear(unfinished: Unfinished | None) -> None:
    if unfinished is not None:
        native_checkpoint.gather_answers(None, None)  # wait until no rank is writing
        if dist.get_rank() == 0:
            of_steps.discard(unfinished.path)


def _check(wrapped: Wrapped, path: Path, saved: Description) -> None:
    if saved.wrap != wrapped.checkpoint_format:
        wrote, here = wrappers.of_format(saved.wrap), wrappers.of_format(wrapped.checkpoint_format)
        raise RequestError(
            f"{path} was saved with parallel.wrap={wrote}, but this run has {here}, whose format differs. "
            f"Use parallel.wrap={wrote}, or another folder"
        )


def _place(loader: of_data.Stateful | None, layout: Layout, path: Path, saved: Description) -> bool:
    """Restore the loader's position and return True. If that is impossible, return False; rank 0 prints the reason."""
    there = of_data.is_in(saved.files)
    if loader is not None and there and saved.data_parallel == layout.data_parallel:
        of_data.load_loader_state(loader, layout, dist.get_rank(), path)
        return True
    if dist.get_rank() == 0 and (loader is not None or there):
        if loader is None:
            why = "contains the loader's position, but load() was called without a loader"
        elif not there:
            why = "was saved without a loader, so the loader starts at the first sample"
        else:
            why = f"has loader positions for {saved.data_parallel} data shares, but this run has {layout.data_parallel}"
            why += ", so the loader starts at the first sample"
        say(f"{path.name} {why}; {saved.samples} samples were processed before")
    return False
