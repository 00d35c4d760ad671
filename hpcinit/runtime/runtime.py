"""What init returns: a rank whose process group is up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hpcinit.base import background_writer, safe_files
from hpcinit.base.errors import BringUpError
from hpcinit.records import plain_files, results, run_folder, scratch
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Hang, Training
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.records.stop_reasons import Stop, Stopping
from hpcinit.runtime import process_group, seeds
from hpcinit.runtime.init_request import Plan, Request
from hpcinit.runtime.lifecycle import phase
from hpcinit.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.parallel import ParallelStyle

    from hpcinit.runtime.checkpoint import Loaded
    from hpcinit.runtime.checkpoint.random_state import Stateful
    from hpcinit.runtime.lifecycle.heartbeat import Heartbeat
    from hpcinit.runtime.lifecycle.stopping import Stopper
    from hpcinit.runtime.wrap import Wrapped
    from hpcinit.runtime.wrap.wrapped import MakeOptimizer

PROGRESS_EVERY_S = 1.0
HEARTBEAT_AGAIN_S = 60.0  # until a heartbeat that had no room on its disk is tried again


@dataclass
class Session:
    """Everything that changes while a process group is up, and what shutdown() needs to know of its start.

    request: the arguments of init. kept_groups: those that were there before, None where the default group is ours.
    deepspeed: started from here. collective_timeout: as last set. told: the last step that progress() reported, asked:
    how often should_stop() was called.
    """

    request: Request
    kept_groups: frozenset[ProcessGroup] | None
    deepspeed: bool
    collective_timeout: timedelta
    progress_at: float = float("-inf")
    stopper: Stopper | None = None
    longest_save: timedelta = timedelta()
    heartbeat: Heartbeat | None = None
    heartbeat_at: float = float("-inf")
    scratch: Path | None = None
    told: int | None = None
    asked: int = 0

    def close(self) -> None:
        """Put back what was changed in this process, and wait for the last reports."""
        for thing in (self.stopper, self.heartbeat):
            if thing is not None:
                thing.close()
        self.stopper = self.heartbeat = None
        background_writer.flush()


@dataclass(frozen=True)
class Runtime:
    """A rank whose process group is up.

    world: all that is known of this rank's place. plan: what init decided. The commonest of both are properties here.
    mesh: one dimension per kind of parallelism in use. folder: the run folder, None without a submission.
    """

    world: World
    plan: Plan
    mesh: DeviceMesh
    folder: Path | None
    _session: Session = field(repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """torch.device of this rank, already current."""
        return self.plan.device

    @property
    def backend(self) -> str:
        """The process group's backend on `device`."""
        return self.plan.backend

    @property
    def timeout(self) -> timedelta:
        """How long the start-up was allowed to take."""
        return self.plan.timeout

    @property
    def layout(self) -> Layout:
        """How the ranks are divided; every degree is known."""
        return self.plan.layout

    @property
    def batch(self) -> Batch:
        """Samples of a step."""
        return self.plan.batch

    @property
    def training(self) -> Training:
        """What wrap() goes by."""
        return self.plan.training

    @property
    def seed(self) -> int:
        """As requested, before seed_by makes it this rank's."""
        return self.plan.seed

    @property
    def seed_by(self) -> str:
        """'same', 'rank' or 'data'."""
        return self.plan.seed_by

    @property
    def data_rank(self) -> int:
        """Which share of the samples is this rank's."""
        return self.layout.data_rank(self.rank)

    @property
    def stopping(self) -> Stopping:
        """What should_stop() goes by."""
        return self.plan.stopping

    @property
    def hang(self) -> Hang:
        """How long without a step is a hang."""
        return self.plan.hang

    @property
    def checkpoint_timeout(self) -> timedelta:
        """How long ranks wait for each other in save() and load()."""
        return self.plan.checkpoint_timeout

    @property
    def rank(self) -> int:
        """0 to world_size - 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        """0 to local_world_size - 1, among the ranks of this node. The device's index is device.index."""
        return self.world.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node; other nodes may have more or fewer."""
        return self.world.local_world_size

    @property
    def node_rank(self) -> int:
        """This node's place in `hosts`."""
        return self.world.node_rank

    @property
    def hosts(self) -> tuple[str, ...]:
        """Node names in the order of node_rank; empty where the launcher does not tell (torchrun)."""
        return self.world.hosts

    @property
    def collective_timeout(self) -> timedelta:
        """How long a collective may take before it fails, as last set."""
        return self._session.collective_timeout

    def set_collective_timeout(self, timeout: timedelta) -> None:
        """From now on, of all groups that this rank is in by now; every rank should call it with the same.

        A group that is made afterwards (dist.new_group, DeepSpeed) starts with torch's own until this is called again.
        Raises BringUpError for a timeout that is not positive, or a backend that cannot change it.
        """
        if timeout <= timedelta():
            raise BringUpError(f"collective timeout {timeout}, expected more than 0")
        if not process_group.set_timeout(timeout):
            raise BringUpError(f"backend {self.backend} cannot change its timeout, it stays {self.collective_timeout}")
        self._session.collective_timeout = timeout

    def loader_options(self, epoch: int = 0) -> dict[str, torch.Generator]:
        """`DataLoader(dataset, **run.loader_options(epoch))`: an order and workers that are this data share's own."""
        return seeds.loader_options(self.seed, self.data_rank, epoch)

    def wrap(
        self,
        model: nn.Module,
        *,
        optimizer: MakeOptimizer | None = None,
        tp_plan: Mapping[str, ParallelStyle] | None = None,
        blocks: Sequence[nn.Module] | None = None,
        mpu: Any = None,
    ) -> Wrapped:
        """`model`, trainable on all ranks as the config says: DDP, FSDP or DeepSpeed. See hpcinit.runtime.wrap.wrap."""
        from hpcinit.runtime import wrap  # noqa: PLC0415 - a second to import, for those who train

        return wrap.wrap(
            model,
            mesh=self.mesh,
            layout=self.layout,
            device=self.device,
            batch=self.batch,
            training=self.training,
            optimizer=optimizer,
            tp_plan=tp_plan,
            blocks=blocks,
            mpu=mpu,
        )

    def shard_sequence(self, *tensors: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, ...]:
        """This rank's part of each tensor along `dim`, the sequence, with context parallelism; else the tensors."""
        from hpcinit.runtime.wrap import sequence  # noqa: PLC0415 - as above

        return sequence.shard(self.layout, self.rank, *tensors, dim=dim)

    def save(
        self,
        wrapped: Wrapped,
        folder: Path | str,
        step: int,
        *,
        loader: Stateful | None = None,
        extra: Any = None,
        samples: int | None = None,
        keep: int | None = None,
        timeout: timedelta | None = None,
    ) -> Path:
        """A checkpoint of all ranks in folder/step-N, there whole or not at all. See runtime.checkpoint.save.

        timeout: how long ranks wait for each other here; None: the longer of checkpoint_timeout and collective_timeout.
        """
        from hpcinit.runtime import checkpoint  # noqa: PLC0415 - as above

        began, timeout = time.monotonic(), self._patience(timeout)
        with phase.during("saving", max(timeout, phase.LONG * timedelta(seconds=self.hang.after_s))):
            written = checkpoint.save(
                wrapped,
                Path(folder),
                step,
                layout=self.layout,
                seed=self.seed,
                loader=loader,
                extra=extra,
                samples=samples,
                keep=keep,
                timeout=timeout,
                job=self.world.job,
            )
        self._session.longest_save = max(self._session.longest_save, timedelta(seconds=time.monotonic() - began))
        return written

    def load(
        self,
        wrapped: Wrapped,
        folder: Path | str,
        *,
        loader: Stateful | None = None,
        timeout: timedelta | None = None,
    ) -> Loaded | None:
        """The newest whole step, whatever number of ranks wrote it; None if there is none. See checkpoint.load.

        timeout: how long ranks wait for each other here; None: the longer of checkpoint_timeout and collective_timeout.
        """
        from hpcinit.runtime import checkpoint  # noqa: PLC0415 - as above

        timeout = self._patience(timeout)
        with phase.during("loading", max(timeout, phase.LONG * timedelta(seconds=self.hang.after_s))):
            return checkpoint.load(
                wrapped,
                Path(folder),
                layout=self.layout,
                loader=loader,
                seed_by=self.seed_by,
                timeout=timeout,
                job=self.world.job,
            )

    def _patience(self, timeout: timedelta | None) -> timedelta:
        """How long ranks wait for each other in save() and load()."""
        return timeout or max(self.checkpoint_timeout, self.collective_timeout)

    def should_stop(self) -> Stop | None:
        """Whether to save and end now, and why: `if run.should_stop(): run.save(...); break`.

        Every rank must call it after every step. All of them get the same answer at the same step, whichever of them
        saw a reason: SIGTERM (preemption, scancel), the job's time limit with a margin, `hpcinit cancel --save`. From
        the first call on SIGTERM ends a rank only when it is stuck.
        """
        self._session.asked += 1
        self._beat(self._session.asked if self._session.told is None else self._session.told)
        if self._session.stopper is None:
            from hpcinit.runtime.lifecycle.stopping import Stopper  # noqa: PLC0415 - a group more, for those who ask

            self._session.stopper = Stopper(
                self.world, self.stopping, self.collective_timeout, self.folder, dict(os.environ)
            )
        self._session.stopper.longest_save = self._session.longest_save
        return self._session.stopper.ask()

    def phase(self, name: str, limit: timedelta | None = None) -> AbstractContextManager[None]:
        """`with run.phase("evaluating"):` - no step ends in this block, and that is not a hang.

        Every rank must enter it, those that only wait for another rank too. run.save() and run.load() are such phases
        already. limit: from then on silence counts again; by default ten times hang.after_s. SIGTERM within a phase
        lets it end.
        """
        return phase.during(name, limit)

    def time_left(self) -> timedelta | None:
        """Until the job's time limit; None if it is not known.

        With should_stop() rank 0 asks Slurm, so a limit that was changed since is known, and all ranks have the same.
        """
        stopper = self._session.stopper
        return left_of_job(os.environ, time.time()) if stopper is None else stopper.left()

    def progress(self, step: int, total: int, **values: float) -> None:
        """Tell those who wait how far the training is: `run.progress(step, total, loss=1.2)`.

        Only rank 0 writes, at most once a second and always at the last step. On every rank it is a sign of life. A
        thread writes, so that no step waits for the file system; where that fails, there is one warning.
        """
        self._session.told = step
        phase.told(step)
        self._beat(step)
        now = time.monotonic()
        if self.rank or self.folder is None:
            return
        if step < total and now - self._session.progress_at < PROGRESS_EVERY_S:
            return
        self._session.progress_at = now
        document = {"step": step, "total": total, "values": values, "time": time.time()}
        path, text = self.folder / run_folder.PROGRESS, json.dumps(document) + "\n"

        def write() -> None:
            safe_files.write_atomically(path, text)
            plain_files.write(path.with_name(run_folder.STEP), {"step": step})

        background_writer.later(run_folder.PROGRESS, write)

    def result(self, value: float | Sequence[float]) -> None:
        """What the training came to, for a sweeper that waits for it: `run.result(loss)`, or one number per objective.

        Only rank 0 writes, and only where there is a run folder; the last call counts. Raises RequestError for a value
        that is no number. Where the file cannot be written, hpcinit tries again until the process ends, and then prints
        the result; the exit status stays the program's own.
        """
        known = results.checked_value(value)
        if self.rank == 0 and self.folder is not None:
            results.write_or_print(self.folder, known)

    def _beat(self, step: int) -> None:
        """A sign of life. step: as told by progress(), or how often should_stop() was asked where nothing is told."""
        session = self._session
        if self.folder is None or not self.hang.after_s:
            return
        if session.heartbeat is None:
            now = time.monotonic()
            if now < session.heartbeat_at + HEARTBEAT_AGAIN_S:
                return
            session.heartbeat_at = now
            with background_writer.suppressed("this rank's heartbeat"):
                session.heartbeat = self._heartbeat(self.folder)
        if session.heartbeat is not None:
            session.heartbeat.tell(step)

    def _heartbeat(self, folder: Path) -> Heartbeat:
        """Raise OSError where this node has no disk for it."""
        from hpcinit.runtime.lifecycle import heartbeat  # noqa: PLC0415 - for those who tell their steps

        if self._session.scratch is None:
            place = scratch.base(os.environ)
            if place is None:
                raise OSError("no folder in TMPDIR, /tmp or /var/tmp is private and executable")
            self._session.scratch = scratch.take(place, self.world.job)
        table = self._session.scratch / heartbeat.TABLE
        return heartbeat.Heartbeat(self.world, self.hang, folder, table)
