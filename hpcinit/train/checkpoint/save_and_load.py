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
from hpcinit.train.checkpoint import owner as owners
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
        loader: whether the loader's position was restored. False if no position was saved, if load() got no loader, or
            if the number of shares of the data has changed. The program must then skip the first `samples` samples of
            the whole data set.
        random: whether the states of the random generators were restored. False if the layout has changed. The
            generators are then seeded instead, see random_state.
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
    loader: random_state.Stateful | None = None,
    extra: Any = None,
    samples: int | None = None,
    keep: int | None = None,
    timeout: timedelta = TIMEOUT,
    job: str = "",
    wait: bool = True,
) -> Path:
    """Save the state after `step` optimizer steps as a checkpoint, and return its folder. Every rank must call it.

    Runtime.save describes the other arguments and the errors.

    job: World.job. It shows which of a job's attempts is the latest. Only rank 0's value is used.
    """
    random_state.check_loader(loader)
    if keep is not None and keep < 1:
        raise RequestError(f"keep is {keep}, expected 1 or more, or None to keep all")
    wrapped.refuse_offloaded("save()")
    if not wrapped.between_steps:
        raise RequestError(
            "save() during gradient accumulation would lose gradients; call it after step() returned True"
        )
    checkpoint_folder.name(step)  # raises RequestError for a negative step
    described = _describe(wrapped, step, wrapped.batch.total * step if samples is None else samples, layout, seed)
    background = not wait and wrapped.checkpoint_format == wrappers.TORCH_FORMAT  # DeepSpeed writes its files itself
    saves = background_save.of_this_process() if background else None
    with native_checkpoint.patient(timeout):
        background_save.finish(timeout / 2)
        return _Save(wrapped, folder, step, described, layout, loader, extra, job, timeout / 2, keep, saves).run()


@dataclass(frozen=True)
class _Save:
    """A call of save().

    described: the fields of the Description that do not depend on the written files.
    patience: how long to wait for the removal of older checkpoints.
    saves: the background saves of this rank, or None to wait until the checkpoint is complete.
    """

    wrapped: Wrapped
    folder: Path
    step: int
    described: dict[str, Any]
    layout: Layout
    loader: random_state.Stateful | None
    extra: Any
    job: str
    patience: timedelta
    keep: int | None
    saves: BackgroundSaves | None

    def run(self) -> Path:
        """Save, and return the checkpoint's folder. Raise the same errors as save()."""
        unfinished: Unfinished | None = None
        final = self.folder / checkpoint_folder.name(self.step)
        try:
            unfinished = native_checkpoint.on_rank_0(self._begin)
            if unfinished is None or (self.saves is not None and self._hand_over(unfinished, self.saves)):
                return final
            path, rank, written = unfinished.path, dist.get_rank(), self._write(unfinished.path)
            parts = native_checkpoint.everywhere(lambda: checkpoint_folder.files_of(path, written, rank))
            files = {name: file for part in parts for name, file in part.items()}
            description = Description(**self.described, files=files, save=unfinished.save, owner=unfinished.owner)
            native_checkpoint.on_rank_0(partial(checkpoint_folder.publish, unfinished, description))
        except CheckpointError as error:
            winner = owners.taken_by(self.folder, unfinished.owner) if unfinished else None
            left = checkpoint_folder.what_is_left(self.folder)
            _clear(unfinished)
            text = f"cannot save step {self.step} in {self.folder}: {error}; {left}"
            if unfinished and winner:  # a restart would not help: the new owner may have removed the step
                lost = owners.lost(self.folder, unfinished.owner, winner)
                raise RequestError(f"{text}; {lost}", quoted=error.quoted) from error
            raise CheckpointError(text, quoted=error.quoted) from error
        except RequestError:
            _clear(unfinished)
            raise
        if self.keep is not None and dist.get_rank() == 0:
            checkpoint_folder.remove_later(partial(checkpoint_folder.prune, self.folder, self.keep))
        return final

    def _begin(self) -> Unfinished | None:
        """Create the folder of the unfinished checkpoint. If the disk is full during a background save, return None."""
        try:
            owner = owners.of_this_process(self.job)
            return checkpoint_folder.begin(self.folder, self.step, owner, self.patience.total_seconds())
        except OSError as error:
            if self.saves is None or error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            left = checkpoint_folder.what_is_left(self.folder)
            # Only warn, as the writer process does.
            say(f"warning: cannot save step {self.step} in {self.folder}: {error}; {left}; training continues")
            return None

    def _hand_over(self, unfinished: Unfinished, saves: BackgroundSaves) -> bool:
        """Copy the state into memory and let the writer processes save it. Return False if this fails on any rank."""
        problem = saves.start()
        names = self._write(unfinished.path, saves.staged)
        problems = native_checkpoint.everywhere(lambda: problem or saves.staged.problem())
        if problem := next(filter(None, problems), ""):
            saves.staged.free()
            if dist.get_rank() == 0:
                say(f"saving step {self.step} takes as long as with wait=True, because {problem}")
            return False
        saves.hand_over(unfinished, self.described, names, dist.get_rank(), self.keep)
        return True

    def _write(self, folder: Path, staged: StagedFiles | None = None) -> list[str]:
        """Write this rank's files into `folder` or `staged`, and return their names.

        Write the program's own values first, because they are small and the most likely to fail.
        """
        rank = dist.get_rank()

        def write(name: str, content: bytes) -> None:
            if staged is None:
                checkpoint_folder.write(folder / name, content)
            else:
                staged.write(name, content)

        def of_program() -> list[str]:
            files = random_state.save_random_state(rank, write)
            files += random_state.save_loader_state(self.loader, self.layout, rank, write)
            if rank == 0:
                scaler = {} if self.wrapped.scaler is None else self.wrapped.scaler.state_dict()
                own = {"extra": self.extra, "scaler": scaler}
                files += random_state.save_plain(own, random_state.EXTRA, write, "extra")
            return files

        written = native_checkpoint.everywhere(of_program)[rank]
        # save_files() is collective: if it fails on one rank, all ranks raise CheckpointError.
        return written + self.wrapped.save_files(folder, staged)


def load(
    wrapped: Wrapped,
    folder: Path,
    *,
    layout: Layout,
    loader: random_state.Stateful | None = None,
    seed_by: str = "same",
    timeout: timedelta = TIMEOUT,
    job: str = "",
) -> Loaded | None:
    """Load the newest complete checkpoint into a model that run.wrap() returned. Return None if there is none.

    The ranks first check the checksums of all files. The number of ranks and the layout may differ from those of the
    run that saved the checkpoint.

    Random numbers continue as without an interruption, with one exception: a DataLoader without a generator draws a
    number when it starts. To avoid that, create the DataLoader with the options from run.loader_options().

    Runtime.load describes the other arguments and the errors.

    seed_by: 'same', 'rank' or 'data': how generators are seeded if the layout has changed.
    job: as in save().
    """
    random_state.check_loader(loader)
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
    """Return the newest undamaged checkpoint, or None. The result is the same on every rank."""
    say_once = cache(say)

    def newest() -> tuple[Path, Description] | None:
        return checkpoint_folder.newest(folder, say_once)

    def first() -> tuple[Path, Description] | None:
        # newest() must not find a folder that is being removed.
        checkpoint_folder.wait_for_removals(timeout.total_seconds() / 2)
        owner = owners.of_this_process(job)
        with suppress(OSError):  # the folder may be missing, or read-only for this job
            owners.claim_after_restart(folder, owner)
            if os.access(folder, os.W_OK):
                checkpoint_folder.sweep(folder, owner)
        return newest()

    found = native_checkpoint.on_rank_0(first)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    while found is not None:
        problems = native_checkpoint.everywhere(partial(checkpoint_folder.damage, *found, rank, ranks))
        wrong = next(filter(None, problems), None)
        if wrong is None:
            break
        checkpoint_folder.remember_damage(*found, wrong)
        found = native_checkpoint.on_rank_0(newest)  # newest() prints that it skips the damaged step
    return found


def _of_program(
    wrapped: Wrapped, loader: random_state.Stateful | None, layout: Layout, path: Path, saved: Description, seed_by: str
) -> Loaded:
    own = random_state.load_plain(path / random_state.EXTRA)
    if wrapped.scaler is not None and own["scaler"]:
        wrapped.scaler.load_state_dict(own["scaler"])
    placed = _place(loader, layout, path, saved)
    # Last, because the calls above may draw random numbers.
    drawn = random_state.load_random_state(path, saved, layout, seed_by)
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


def _clear(unfinished: Unfinished | None) -> None:
    if unfinished is not None:
        native_checkpoint.gather_answers(None, None)  # wait until no rank is writing
        if dist.get_rank() == 0:
            checkpoint_folder.discard(unfinished.path)


def _check(wrapped: Wrapped, path: Path, saved: Description) -> None:
    if saved.wrap != wrapped.checkpoint_format:
        wrote, here = wrappers.of_format(saved.wrap), wrappers.of_format(wrapped.checkpoint_format)
        raise RequestError(
            f"{path} was saved with parallel.wrap={wrote}, but this run has {here}, which cannot load it. "
            f"Use parallel.wrap={wrote}, or another folder"
        )


def _place(loader: random_state.Stateful | None, layout: Layout, path: Path, saved: Description) -> bool:
    """Restore the loader's position and return True. If that is impossible, return False; rank 0 prints the reason."""
    there = random_state.is_in(saved.files)
    if loader is not None and there and saved.data_parallel == layout.data_parallel:
        random_state.load_loader_state(loader, layout, dist.get_rank(), path)
        return True
    if dist.get_rank() == 0 and (loader is not None or there):
        if loader is None:
            why = "contains the loader's position, but load() was called without a loader"
        elif not there:
            why = "was saved without a loader, so the loader starts at the first sample"
        else:
            why = f"has loader positions for {saved.data_parallel} data shares, but this run has {layout.data_parallel}"
            why += ", so the loader starts at the first sample"
        say(f"{path.name} {why}; {saved.samples} samples were processed up to this step")
    return False
