"""Checkpoints in the ecosystem's own formats: a step that is there is whole, and other ranks can go on from it.

FOLDER/.owner.json                     the job that may publish steps here
       step-00000042/checkpoint.json   what it is, and the size and checksum of every file
                     dcp/              torch.distributed.checkpoint: ddp, fsdp, tensor parallelism
                     deepspeed/        DeepSpeed's; universal/ beside it once other ranks have loaded it
                     loader/           place in the data, a file for each share of it
                     random/           where the random generators stand, a file for each rank
                     extra.pt          what the program gave

Both formats are read with pickle, by torch and by DeepSpeed: load what you wrote.
"""

from __future__ import annotations

import shutil
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
from hpcinit.runtime.checkpoint import checkpoint_folder, native_checkpoint, random_state
from hpcinit.runtime.checkpoint import checkpoint_folder as of_steps
from hpcinit.runtime.checkpoint import owner as owners
from hpcinit.runtime.checkpoint import random_state as of_data
from hpcinit.runtime.checkpoint.checkpoint_folder import Description, File, Unfinished
from hpcinit.runtime.wrap.wrapped import Wrapped

__all__ = ["CheckpointError", "Loaded", "load", "save"]

TIMEOUT = timedelta(seconds=CHECKPOINT_S)


@dataclass(frozen=True)
class Loaded:
    """step, extra: as they were saved. samples: seen by all ranks together until then.

    loader: whether the loader has its place again. False where none was saved or given, or where the data is divided
    among another number of ranks: a place belongs to one of so many shares. Skip `samples` of the whole data then.
    random: whether each rank's generators stand where they stood. False where the layout is another: see randomness.
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
) -> Path:
    """Called by every rank after `step` steps of the optimizer; the folder that holds it all, once it is whole.

    folder: seen by all nodes. extra: plain values and tensors, such as a schedule's state_dict(); rank 0's is written.
    samples: seen so far, None for step x global batch. keep: how many to keep, the oldest go, None for all; they are
    removed in the background. timeout: how long ranks wait for each other. job: World.job, which orders the attempts
    of a job; only rank 0's is used.

    Raises RequestError for what cannot be saved, also where another job has taken the folder over, CheckpointError when
    it cannot be written: what was there is left.
    """
    of_data.check_loader(loader)
    if keep is not None and keep < 1:
        raise RequestError(f"keep is {keep}, expected 1 or more, or None for all")
    wrapped.refuse_offloaded("save()")
    if not wrapped.between_steps:
        raise RequestError("save() within an accumulation, whose gradients would be lost: after a step() that is True")
    of_steps.name(step)  # raises for a step below 0
    described = _describe(wrapped, step, wrapped.batch.total * step if samples is None else samples, layout, seed)
    with native_checkpoint.patient(timeout):
        final = _save(wrapped, folder, described, layout, loader, extra, job, timeout)
    if keep is not None and dist.get_rank() == 0:
        checkpoint_folder.remove_later(partial(of_steps.prune, folder, keep))
    return final


def _save(
    wrapped: Wrapped,
    folder: Path,
    described: dict[str, Any],
    layout: Layout,
    loader: of_data.Stateful | None,
    extra: Any,
    job: str,
    timeout: timedelta,
) -> Path:
    step, timeout_s = described["step"], timeout.total_seconds()
    unfinished: Unfinished | None = None

    def begin() -> Unfinished:
        return of_steps.begin(folder, step, owners.of_this_process(job, timeout_s), removals_s=timeout_s / 2)

    def publish() -> Path:
        assert unfinished is not None
        return of_steps.publish(
            unfinished, Description(**described, files=files, save=unfinished.save, owner=unfinished.owner)
        )

    try:
        unfinished = native_checkpoint.on_rank_0(begin)
        files = _write(wrapped, unfinished.path, layout, loader, extra)
        return native_checkpoint.on_rank_0(publish)
    except CheckpointError as error:
        winner = owners.taken_by(folder, unfinished.owner) if unfinished else None
        text = _undone(folder, unfinished, step, error)
        if unfinished and winner:  # it may have removed the unfinished step, so that a restart would not help
            lost = owners.lost(folder, unfinished.owner, winner)
            raise RequestError(f"{text}; {lost}", quoted=error.quoted) from error
        raise CheckpointError(text, quoted=error.quoted) from error
    except RequestError:
        _clear(unfinished)
        raise


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
    """The newest whole step, into what run.wrap has just made; None if there is none. Called by every rank.

    All files are read and compared with their checksums first, each by one rank; a damaged step is skipped with a line.
    The number of ranks and the layout may be others than those that wrote it; the kind of wrapping may differ between
    ddp and fsdp. Random numbers go on as if nobody had stopped, unless a DataLoader draws from torch's own generator
    as it begins: give it one, as run.loader_options() does. seed_by: 'same', 'rank' or 'data', for another layout.
    timeout, job: as save() has them.

    Raises RequestError for what does not fit, CheckpointError for what cannot be read.
    """
    of_data.check_loader(loader)
    wrapped.refuse_offloaded("load()")
    with native_checkpoint.patient(timeout):
        found = _newest(folder, job, timeout)
        if found is None:
            return None
        path, saved = found
        _check(wrapped, path, saved)
        wrapped.load_files(path, saved, layout)
        work = partial(_of_program, wrapped, loader, layout, path, saved, seed_by)
        return native_checkpoint.everywhere(work)[dist.get_rank()]


def _newest(folder: Path, job: str, timeout: timedelta) -> tuple[Path, Description] | None:
    """The newest step whose files have the content that was written. The same on every rank."""
    say_once = cache(say)

    def newest() -> tuple[Path, Description] | None:
        return of_steps.newest(folder, say_once)

    def first() -> tuple[Path, Description] | None:
        checkpoint_folder.wait_for_removals(timeout.total_seconds() / 2)  # what is being removed is not to be found
        owner = owners.of_this_process(job, timeout.total_seconds())
        with suppress(OSError):  # a folder that this job may only read
            if owners.claim_after_restart(folder, owner):
                of_steps.sweep(folder, owner)
        return newest()

    found = native_checkpoint.on_rank_0(first)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    while found is not None:
        wrong = next(filter(None, native_checkpoint.everywhere(partial(of_steps.damage, *found, rank, ranks))), None)
        if wrong is None:
            break
        of_steps.remember_damage(*found, wrong)
        found = native_checkpoint.on_rank_0(newest)  # says that it skips what was just found
    return found


def _of_program(
    wrapped: Wrapped, loader: of_data.Stateful | None, layout: Layout, path: Path, saved: Description, seed_by: str
) -> Loaded:
    own = of_data.load_plain(path / of_data.EXTRA)
    if wrapped.scaler is not None and own["scaler"]:
        wrapped.scaler.load_state_dict(own["scaler"])
    placed = _place(loader, layout, path, saved)
    drawn = random_state.load_random_state(path, saved, layout, seed_by)  # last: what comes before may draw
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
    wrapped: Wrapped, folder: Path, layout: Layout, loader: of_data.Stateful | None, extra: Any
) -> dict[str, File]:
    """All ranks' files. The program's own first: they are small, and may be what cannot be saved."""
    rank = dist.get_rank()

    def of_program() -> list[str]:
        files = random_state.save_random_state(rank, folder) + of_data.save_loader_state(loader, layout, rank, folder)
        if rank == 0:
            own = {"extra": extra, "scaler": {} if wrapped.scaler is None else wrapped.scaler.state_dict()}
            files += of_data.save_plain(own, of_data.EXTRA, folder, "extra")
        return files

    written = native_checkpoint.everywhere(of_program)[rank]
    written += wrapped.save_files(folder)  # collective: if it fails on one rank, all raise CheckpointError
    told = native_checkpoint.everywhere(lambda: of_steps.files_of(folder, written, rank))
    return {name: file for files in told for name, file in files.items()}


def _undone(folder: Path, unfinished: Unfinished | None, step: int, error: CheckpointError) -> str:
    before = of_steps.newest(folder, lambda _: None)
    _clear(unfinished)
    try:
        free = f"; {shutil.disk_usage(folder).free / 1e9:.1f} GB are free there"
    except OSError:
        free = ""
    left = f"{before[0].name} is the newest" if before else "there is no other"
    return f"step {step} was not saved in {folder}: {error}{free}; {left}"


def _clear(unfinished: Unfinished | None) -> None:
    if unfinished is not None:
        native_checkpoint.gather_answers(None, None)  # no rank writes any more
        if dist.get_rank() == 0:
            of_steps.discard(unfinished.path)


def _check(wrapped: Wrapped, path: Path, saved: Description) -> None:
    if saved.wrap != wrapped.checkpoint_format:
        wrote, here = wrappers.of_format(saved.wrap), wrappers.of_format(wrapped.checkpoint_format)
        raise RequestError(
            f"{path} was written with parallel.wrap={wrote}, and this is {here}: their formats differ; "
            f"parallel.wrap={wrote}, or another folder"
        )


def _place(loader: of_data.Stateful | None, layout: Layout, path: Path, saved: Description) -> bool:
    """Whether the loader now has its place; one line by rank 0 where it was expected to and has not."""
    there = of_data.is_in(saved.files)
    if loader is not None and there and saved.data_parallel == layout.data_parallel:
        of_data.load_loader_state(loader, layout, dist.get_rank(), path)
        return True
    if dist.get_rank() == 0 and (loader is not None or there):
        if loader is None:
            why = "has the loader's place, and load() was given no loader"
        elif not there:
            why = "was saved without a loader, which begins anew"
        else:
            why = f"has the places of {saved.data_parallel} shares of the data, and there are {layout.data_parallel}"
            why += ": the loader begins anew"
        say(f"{path.name} {why}; {saved.samples} samples have been seen")
    return False
