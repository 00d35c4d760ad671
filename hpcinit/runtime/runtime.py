"""Defines Runtime, the object that init() returns: a rank with an initialized process group."""

from __future__ import annotations

import json
import math
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
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hpcinit.base import background_writer, safe_files
from hpcinit.base.console import say
from hpcinit.base.errors import BringUpError, RequestError
from hpcinit.records import drill_records, program_use, results, run_folder, scratch
from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Hang, Training
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.records.stop_reasons import Stop, Stopping
from hpcinit.runtime import mesh as mesh_of_run
from hpcinit.runtime import process_group, seeds
from hpcinit.runtime.init_request import Plan, Request
from hpcinit.runtime.lifecycle import phase
from hpcinit.runtime.process_state import state
from hpcinit.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.parallel import ParallelStyle

    from hpcinit.runtime.lifecycle.heartbeat import Heartbeat
    from hpcinit.runtime.lifecycle.save_timing import SaveTiming
    from hpcinit.runtime.lifecycle.sigterm import FirstStepWatch
    from hpcinit.runtime.lifecycle.stopping import Stopper
    from hpcinit.train.checkpoint import Loaded
    from hpcinit.train.checkpoint.export_weights import Saves
    from hpcinit.train.checkpoint.random_state import Stateful
    from hpcinit.train.wrap import Wrapped
    from hpcinit.train.wrap.wrapped import MakeOptimizer

PROGRESS_EVERY_S = 1.0
HEARTBEAT_AGAIN_S = 60.0  # how long to wait before another try if the heartbeat's table could not be created


@dataclass
class Session:
    """The state of a Runtime that changes between init() and shutdown().

    request: the arguments of init().
    kept_groups: the process groups that existed before init(), or None if hpcinit created the default group.
    deepspeed: whether hpcinit initialized DeepSpeed.
    collective_timeout: the timeout of collectives, as last set.
    last_step: the last step that progress() reported.
    stop_calls: how often should_stop() was called.
    save_timing: decides when to save. Set by should_save().
    training_used: whether the program has read the settings of run.wrap().
    not_finite: the first step at which a value passed to progress() was NaN or infinite.
    """

    request: Request
    kept_groups: frozenset[ProcessGroup] | None
    deepspeed: bool
    collective_timeout: timedelta
    not_finite: dict[str, int] = field(default_factory=dict)
    stopper: Stopper | None = None
    first_step_watch: FirstStepWatch | None = None
    longest_save: timedelta = timedelta()
    heartbeat: Heartbeat | None = None
    heartbeat_at: float = float("-inf")
    scratch: Path | None = None
    last_step: int | None = None
    stop_calls: int = 0
    save_timing: SaveTiming | None = None
    training_used: bool = False

    def close(self) -> None:
        """Restore what init() changed in this process, and wait until the last reports are written."""
        for thing in (self.stopper, self.first_step_watch, self.heartbeat):
            if thing is not None:
                thing.close()
        self.stopper = self.first_step_watch = self.heartbeat = None
        background_writer.flush()


@dataclass(frozen=True)
class Runtime:
    """A rank with an initialized process group, as returned by init().

    Attributes:
        world: this rank's place in the job: rank, node, hosts, launcher.
        plan: the settings that init() chose. The most common fields of `world` and `plan` are also properties here.
        mesh: torch's DeviceMesh, with one dimension per kind of parallelism; unused ones have size 1.
        folder: the run folder, or None without a submission.
    """

    world: World
    plan: Plan
    mesh: DeviceMesh
    folder: Path | None
    _session: Session = field(repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """This rank's torch.device. It is already torch's current device."""
        return self.plan.device

    @property
    def backend(self) -> str:
        """The name of the process group's backend on `device`."""
        return self.plan.backend

    @property
    def timeout(self) -> timedelta:
        """The time limit of the start-up."""
        return self.plan.timeout

    @property
    def layout(self) -> Layout:
        """How the ranks are divided into dimensions, with the size of every dimension."""
        return self.plan.layout

    @property
    def batch(self) -> Batch:
        """The number of samples per step, and how they are divided among ranks and forward passes."""
        return self.plan.batch

    @property
    def training(self) -> Training:
        """The settings that wrap() uses."""
        if self.rank == 0 and self.folder and not self._session.training_used:
            self._session.training_used = True
            program_use.advance(self.folder, program_use.ProgramUse(program_use.WRAP))
        return self.plan.training

    @property
    def seed(self) -> int:
        """The seed of the run. `seed_by` determines how this rank's own seed follows from it."""
        return self.plan.seed

    @property
    def seed_by(self) -> str:
        """How seeds differ between ranks: 'same', 'rank' or 'data'. See init()."""
        return self.plan.seed_by

    @property
    def data_rank(self) -> int:
        """The number of this rank's share of the data, 0 to layout.data_parallel - 1."""
        return self.layout.data_rank(self.rank)

    @property
    def stopping(self) -> Stopping:
        """The settings that should_stop() uses."""
        return self.plan.stopping

    @property
    def hang(self) -> Hang:
        """The settings of hang detection, such as after how many seconds without a step the ranks report a hang."""
        return self.plan.hang

    @property
    def checkpoint_timeout(self) -> timedelta:
        """How long ranks wait for each other in save() and load()."""
        return self.plan.checkpoint_timeout

    @property
    def rank(self) -> int:
        """This rank's number, 0 to world_size - 1."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self.world.world_size

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, 0 to local_world_size - 1. For the index of its GPU, use device.index."""
        return self.world.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks on this node. Other nodes may have more or fewer."""
        return self.world.local_world_size

    @property
    def node_rank(self) -> int:
        """The index of this rank's node in `hosts`."""
        return self.world.node_rank

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes in the order of node_rank, or () if the launcher does not provide them (torchrun)."""
        return self.world.hosts

    @property
    def collective_timeout(self) -> timedelta:
        """How long a collective may take before it fails. set_collective_timeout() changes it."""
        return self._session.collective_timeout

    def set_collective_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of collectives for all existing process groups of this rank.

        Every rank should set the same timeout. A group that is created later (dist.new_group, DeepSpeed) has torch's
        default until you call this method again. Raise BringUpError if the timeout is not positive or the backend
        cannot change it.

        Args:
            timeout: how long a collective may take.
        """
        if timeout <= timedelta():
            raise BringUpError(f"the collective timeout is {timeout}, expected more than 0")
        if not process_group.set_timeout(timeout):
            raise BringUpError(
                f"torch cannot change the timeout of backend {self.backend}: it remains {self.collective_timeout}"
            )
        self._session.collective_timeout = timeout

    def group(self, name: str) -> ProcessGroup:
        """Return this rank's process group for a dimension or combination of the mesh.

        If the dimension has size 1, the group contains only this rank. Raise RequestError for an unknown name.

        Args:
            name: pp, dp_replicate, dp_shard, cp, tp, ep, or a combination such as dp (ranks with different samples).
                The page 'groups and seeds' lists all names.
        """
        return mesh_of_run.group(self.mesh, name)

    def loader_options(self, epoch: int = 0) -> dict[str, torch.Generator]:
        """Return options that seed a data loader: `DataLoader(dataset, **run.loader_options(epoch))`.

        The result is {'generator': torch.Generator}. torch draws the order of the samples and the seeds of the workers
        from this generator. Its seed depends on the run's seed, this rank's share of the data and `epoch`.

        Args:
            epoch: the number of the epoch. If you create a loader per epoch and pass its number, a restarted run draws
                the same random numbers in this epoch.
        """
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
        """Wrap `model` with DDP, FSDP or DeepSpeed, as configured, so that all ranks train it together, and return it.

        Every rank must call it with the same arguments. Raise RequestError if settings cannot be combined.

        Args:
            model: the whole model, on any device; it is changed in place.
            optimizer: a function that creates an optimizer for the parameters, such as
                `lambda p: torch.optim.AdamW(p, lr=1e-3)`. None for a model that is only evaluated, or if DeepSpeed
                creates the optimizer.
            tp_plan: for tensor parallelism: maps module names to torch's ParallelStyle, such as
                {'layers.*.up': ColwiseParallel()}. * matches one part of a name.
            blocks: the parts of the model that are sharded, checkpointed and compiled one by one. None: the children of
                each outermost ModuleList or Sequential whose children are all of one class.
            mpu: an object that provides DeepSpeed with the groups, if the program divides the model itself.
        """
        from hpcinit.train import wrap  # noqa: PLC0415 - takes a second to import, and not every program trains

        wrapped = wrap.wrap(
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
        if state.training_record is not None:
            state.training_record.built()
        return wrapped

    def shard_sequence(self, *tensors: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, ...]:
        """Return this rank's part of each tensor along the sequence dimension `dim`.

        Without context parallelism, return the tensors unchanged. Raise RequestError if a tensor cannot be divided into
        equal parts.

        Args:
            tensors: tensors with the whole sequence, such as inputs and labels.
            dim: the sequence dimension.
        """
        from hpcinit.train.wrap import sequence  # noqa: PLC0415 - as above

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
        wait: bool = True,
    ) -> Path:
        """Save an atomic checkpoint of all ranks in folder/step-N, and return that folder. Every rank must call it.

        Raise RequestError if an argument cannot be saved, or if another job is using the folder now. Raise
        CheckpointError if writing fails. In both cases, existing checkpoints are unchanged.

        Args:
            wrapped: the model and optimizer, as run.wrap() returned them.
            folder: a folder that all nodes share.
            step: number of finished optimizer steps.
            loader: a data loader with state_dict() and load_state_dict(), whose position is saved.
            extra: plain values and tensors, such as a schedule's state_dict(). Rank 0's value is saved.
            samples: number of samples processed so far. None: step x global batch.
            keep: number of checkpoints to keep; older ones are removed in the background. None: keep all.
            timeout: how long ranks wait for each other. None: checkpoint_timeout.
            wait: True: return when the checkpoint is written.
                False: copy this rank's state into CPU memory and return. A separate process writes the files while
                training continues. If writing fails, hpcinit prints a warning, and this step has no checkpoint. The
                next save(), load() and the end of the program wait for a save that is still running. With too little
                free memory, or with DeepSpeed, save() works as with True.
        """
        from hpcinit.train import checkpoint  # noqa: PLC0415 - as above

        began, timeout = time.monotonic(), timeout or self.checkpoint_timeout
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
                wait=wait,
            )
        state.report("saved", step)
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
        """Load the newest complete checkpoint. Return None if there is none.

        Every rank must call it. A different number of ranks may have saved the checkpoint. If a checkpoint is damaged,
        print a message and try the one before it. ddp and fsdp can load each other's checkpoints. DeepSpeed can load
        only its own. Raise RequestError if the checkpoint does not match the model, and CheckpointError if it cannot be
        read.

        Args:
            wrapped: the model and optimizer, as run.wrap() returned them.
            folder: the folder that was passed to save().
            loader: the data loader whose position was saved.
            timeout: how long ranks wait for each other. None: checkpoint_timeout.
        """
        from hpcinit.train import checkpoint  # noqa: PLC0415 - as above

        timeout = timeout or self.checkpoint_timeout
        with phase.during("loading", max(timeout, phase.LONG * timedelta(seconds=self.hang.after_s))):
            loaded = checkpoint.load(
                wrapped,
                Path(folder),
                layout=self.layout,
                loader=loader,
                seed_by=self.seed_by,
                timeout=timeout,
                job=self.world.job,
            )
        state.report("loaded")
        if state.training_record is not None:
            state.training_record.loaded(loaded.step if loaded else 0)
        return loaded

    def export(
        self,
        wrapped: Wrapped,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        tokenizer: Saves | None = None,
        timeout: timedelta | None = None,
    ) -> Path:
        """Write the complete model weights as safetensors into `folder`, and return the folder.

        Every rank must call it.

        Only rank 0 writes. It needs CPU memory for the whole model in 16 bits. The export is atomic and replaces an
        older one. How to load the folder depends on the model:
        - a model of Transformers: from_pretrained() of Transformers.
        - a PEFT model: from_pretrained() of PEFT. The folder contains only the adapters.
        - any other model: safetensors.torch.load_model() loads model.safetensors.

        Raise RequestError if the model or the folder cannot be used, and CheckpointError if writing fails.

        Args:
            wrapped: the model, as run.wrap() returned it.
            folder: a new folder, or one that an earlier export wrote.
            dtype: type of the weights. None: precision.param if that has 16 bits, else torch.bfloat16.
            tokenizer: a tokenizer or processor of Transformers to save in the folder.
            timeout: how long ranks wait for each other. None: checkpoint_timeout.
        """
        from hpcinit.train.checkpoint import export_weights  # noqa: PLC0415 - as above

        timeout = timeout or self.checkpoint_timeout
        chosen = dtype or (torch.float16 if self.training.precision.param == "fp16" else torch.bfloat16)
        with phase.during("exporting", max(timeout, phase.LONG * timedelta(seconds=self.hang.after_s))):
            return export_weights.export(
                wrapped, Path(folder), dtype=chosen, tokenizer=tokenizer, timeout=timeout, job=self.world.job
            )

    def should_stop(self) -> Stop | None:
        """Return a Stop with the reason if the program should save and exit now, else None.

        Write `if run.should_stop(): run.save(...); break`. Every rank must call it after every step. All ranks get the
        same result at the same step, even if only one rank got a signal. The reason is SIGTERM (preemption, scancel),
        the approaching time limit of the job, or `hpcinit cancel --save`.

        After the first call, SIGTERM no longer ends a rank, unless the rank is stuck. If chain, restart.max_restarts or
        stop.signal is set, SIGTERM does not end a rank in its first step either.
        """
        self._session.stop_calls += 1
        session = self._session
        self._send_heartbeat(session.stop_calls if session.last_step is None else session.last_step)
        if session.last_step is None and state.training_record is not None:
            state.training_record.step(-1)
        if self._session.stopper is None:
            from hpcinit.runtime.lifecycle.stopping import Stopper  # noqa: PLC0415 - creates one more group, only if it is used

            self._session.stopper = Stopper(
                self.world, self.stopping, self.collective_timeout, self.folder, dict(os.environ),
                session.first_step_watch,
            )  # fmt: skip
        if state.background_saves is not None:
            running = timedelta(seconds=state.background_saves.longest_s())
            session.longest_save = max(session.longest_save, running)
        self._session.stopper.longest_save = self._session.longest_save
        return self._session.stopper.ask()

    def should_save(self, least: timedelta = timedelta(minutes=1), most: timedelta = timedelta(hours=1)) -> bool:
        """Return whether the program should save a checkpoint now: `if run.should_save(): run.save(...)`.

        Every rank must call it after every step, with the same bounds. All ranks get the same result.

        hpcinit computes the interval with the formula of Young and Daly, from how long a save takes, how often this run
        has failed and how many nodes it has. Rank 0 prints the interval once. should_stop() requests additional saves,
        at the time limit and at a preemption.

        Raise RequestError if a bound is not positive, or if `least` is larger than `most`.

        Args:
            least: the shortest time between two saves, and the time until the first save.
            most: the longest time between two saves.
        """
        session = self._session
        if session.save_timing is None:
            from hpcinit.runtime.lifecycle.save_timing import SaveTiming  # noqa: PLC0415 - as in should_stop()

            if not timedelta() < least <= most:
                raise RequestError(f"run.should_save(least={least}, most={most}): expected 0 < least <= most")
            session.save_timing = SaveTiming(self.world, self.folder, self.collective_timeout, least, most)
        return session.save_timing.ask()

    def phase(self, name: str, limit: timedelta | None = None) -> AbstractContextManager[None]:
        """Declare that the ranks take no training steps in this block: `with run.phase("evaluating"):`.

        Otherwise, hang detection reports a hang when the ranks finish no step for a long time. Every rank must enter
        the block, even ranks that only wait for another rank. run.save() and run.load() need no such block. After a
        SIGTERM, the block can still finish.

        Args:
            name: what the ranks do, for messages.
            limit: after this time, hang detection is active again. None: ten times hang.after_s.
        """
        return phase.during(name, limit)

    def time_left(self) -> timedelta | None:
        """Return how much time remains until the job's time limit, or None if unknown.

        If the program calls should_stop(), rank 0 queries the limit from Slurm and shares it. Then all ranks get the
        same value, and a limit that was changed with scontrol is used.
        """
        stopper = self._session.stopper
        return left_of_job(os.environ, time.time()) if stopper is None else stopper.left()

    def progress(self, step: int, total: int, **values: float) -> None:
        """Report how far training is, for `hpcinit status` and `hpcinit watch`: `run.progress(step, total, loss=1.2)`.

        Every rank should call it, because it is also the rank's heartbeat for hang detection. Only rank 0 writes a
        file, at most once per second and in a thread, so that a step never waits for the file system. If writing fails,
        hpcinit prints one warning.

        Args:
            step: number of finished steps.
            total: number of steps of the run.
            values: named metrics of this step.
        """
        self._session.last_step = step
        phase.step_done(step)
        state.report("step", step)
        state.report("stepped")
        self._send_heartbeat(step)
        if self.rank or self.folder is None:
            return
        if drill := os.environ.get(drill_records.ENV_DRILL):  # the drill needs every step, but progress.json skips some
            known = {"step": step, "time": time.time(), "values": {k: float(v) for k, v in values.items()}}
            drill_records.append(Path(drill) / drill_records.PROGRESS, known)
        first = self._session.not_finite
        new = [name for name, value in values.items() if name not in first and not _is_finite(value)]
        first.update(dict.fromkeys(new, step))
        document = {"step": step, "total": total, "values": values, "time": time.time(), "not_finite": first.copy()}
        path, text = self.folder / run_folder.PROGRESS, json.dumps(document) + "\n"

        def write() -> None:
            safe_files.write_atomically(path, text)

        at_once = bool(new) or step >= total
        background_writer.later(run_folder.PROGRESS, write, every_s=0.0 if at_once else PROGRESS_EVERY_S)

    def result(self, value: object) -> None:
        """Report the result of the training run: `run.result(loss)`. Python's API and sweepers can read it.

        Only rank 0 writes the result, and only if there is a run folder. The last call counts. If the value cannot be
        written as JSON, print a warning and ignore it. If the file cannot be written, retry until the process exits,
        and then print the result. None of this changes the program's exit status.

        Args:
            value: a number, or a list with a number per objective. A tensor with one element counts as a number. If no
                sweeper runs, the value may also be text, None, a list or a dict.
        """
        if self.rank != 0 or self.folder is None:
            return
        try:
            known = results.reported(value)
        except Exception as error:  # a tensor or another library's number may raise any exception
            say(f"warning: run.result() was ignored: {error}")
            return
        results.write_or_print(self.folder, known)

    def tracker_id(self, value: str) -> None:
        """Store the id of the experiment tracker's run: `run.tracker_id(mlflow.start_run().info.run_id)`.

        With `tracker=mlflow`, hpcinit sets MLFLOW_RUN_ID to this id for rank 0 of the next attempt, so that MLflow
        continues the run. Only rank 0 writes the id. If that fails, hpcinit prints one warning.

        Args:
            value: the id. The last call counts.
        """
        if self.rank == 0 and self.folder is not None:
            with background_writer.suppressed(run_folder.TRACKER):
                safe_files.write_atomically(self.folder / run_folder.TRACKER, f"{value}\n")

    def _send_heartbeat(self, step: int) -> None:
        """Record a heartbeat.

        step: the last step that the program passed to progress(), or the number of its calls of should_stop().
        """
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
            session.heartbeat.step_done(step)

    def _heartbeat(self, folder: Path) -> Heartbeat:
        """Create this rank's heartbeat. Raise OSError if this node has no disk for it."""
        from hpcinit.runtime.lifecycle import heartbeat, output_watch  # noqa: PLC0415 - only for programs that report steps

        output_watch.stop()
        if self._session.scratch is None:
            place = scratch.base(os.environ)
            if place is None:
                raise OSError(
                    "cannot create a private folder for executable files on the node's disk, or in TMPDIR, /tmp or "
                    "/var/tmp"
                )
            self._session.scratch = scratch.take(place, self.world.job)
        table = self._session.scratch / heartbeat.TABLE
        return heartbeat.Heartbeat(self.world, self.hang, folder, table)


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
