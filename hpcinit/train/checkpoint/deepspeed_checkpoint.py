"""Saves and loads DeepSpeed's checkpoints.

If the number of ranks has changed, the checkpoint is first converted to DeepSpeed's universal format.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcinit.base.console import say
from hpcinit.base.errors import CheckpointError, RequestError
from hpcinit.base.text import counted
from hpcinit.train.checkpoint import checkpoint_folder, native_checkpoint
from hpcinit.train.checkpoint.checkpoint_folder import Description

NATIVE, UNIVERSAL = "deepspeed", "universal"
POLL_S = 0.5


def save(engine: Any, folder: Path) -> list[str]:
    """Save a DeepSpeed checkpoint into `folder`. Return the files of this rank.

    If one rank fails, raise CheckpointError on every rank.
    """
    with _recorded(engine) as recorder:
        engine.save_checkpoint(str(folder), tag=NATIVE, save_latest=False)
    native_checkpoint.gather_answers(None, recorder.error)
    return [path.relative_to(folder).as_posix() for path in recorder.written if path.exists()]


def load(engine: Any, path: Path, saved: Description, tp: int) -> None:
    """Load a checkpoint into a new engine.

    Raise RequestError if the ZeRO stages are incompatible, and CheckpointError if loading fails.
    """
    stage = int(engine.zero_optimization_stage())
    tag = UNIVERSAL if _must_convert(saved, stage, dist.get_world_size(), tp) else NATIVE
    if tag == UNIVERSAL and not native_checkpoint.on_rank_0((path / UNIVERSAL).is_dir):
        _convert(path, saved)
    config, before = engine._config, engine._config.load_universal_checkpoint
    config.load_universal_checkpoint = tag == UNIVERSAL  # the same as {"checkpoint": {"load_universal": true}}
    try:
        found, _ = engine.load_checkpoint(str(path), tag=tag)
    finally:
        config.load_universal_checkpoint = before
    if found is None:
        raise CheckpointError(f"DeepSpeed found no checkpoint in {path / tag}. Read DeepSpeed's message above")


def _must_convert(saved: Description, stage: int, world_size: int, tp: int) -> bool:
    """Return whether the checkpoint must be converted because the ranks, the ZeRO stage or tp have changed.

    Raise RequestError if DeepSpeed cannot convert between the two ZeRO stages.
    """
    was = saved.zero_stage or 0
    if was != stage and (min(was, stage) == 0 or max(was, stage) == 3):
        raise RequestError(
            f"the checkpoint of step {saved.step} has deepspeed.zero_stage {was}, but this run has {stage}. DeepSpeed "
            f"can only convert between stages 1 and 2; use deepspeed.zero_stage={was}"
        )
    if (saved.world_size, saved.layout["tp"], was) == (world_size, tp, stage):
        return False
    return bool(stage) or saved.layout["tp"] != tp  # in stage 0 every rank has the whole state


class _FileRecorder:
    """A replacement for DeepSpeed's checkpoint engine that syncs each file and stores errors instead of raising them.

    If a rank raised an error inside save_checkpoint, the other ranks would wait in DeepSpeed's barrier forever.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.written: list[Path] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, state_dict: Any, path: str) -> None:
        self.keep(lambda: self._inner.save(state_dict, path), Path(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.keep(lambda: Path(path).mkdir(parents=True, exist_ok=exist_ok))

    def keep(self, work: Callable[[], object], *paths: Path) -> None:
        try:
            work()
            for path in paths:
                checkpoint_folder.sync(path)
            self.written += paths
        except Exception as error:
            self.error = self.error or error


@contextmanager
def _recorded(engine: Any) -> Iterator[_FileRecorder]:
    inner, recorder = engine.checkpoint_engine, _FileRecorder(engine.checkpoint_engine)
    if inner.is_decoupled():
        raise RequestError(
            "deepspeed.ds_config selects an asynchronous checkpoint writer, but save() must not return before all "
            "files are on the disk: remove 'checkpoint': {'writer': ...}"
        )
    copy = engine._copy_recovery_script  # with which rank 0 copies zero_to_fp32.py
    engine.checkpoint_engine = recorder
    engine._copy_recovery_script = lambda path: recorder.keep(lambda: copy(path))
    try:
        yield recorder
    finally:
        engine.checkpoint_engine = inner
        del engine._copy_recovery_script


def _convert(path: Path, saved: Description) -> None:
    """Convert the checkpoint with DeepSpeed's ds_to_universal, so that any number of ranks can load it.

    Rank 0 runs it in a separate process, because it forks and uses much memory. Meanwhile, the ranks run a collective
    every POLL_S seconds, so that no collective times out. Raise CheckpointError if the conversion fails.
    """
    state = torch.zeros(1, dtype=torch.int32)
    problem = ""
    running = _converter(path, saved) if dist.get_rank() == 0 else None
    while True:
        if running is not None:
            try:
                state[0] = 1 if next(running) else 0
            except Exception as error:
                state[0], problem = 2, native_checkpoint.exception_text(error)
        if dist.get_world_size() > 1:  # a single rank has no gloo group for this CPU tensor
            dist.broadcast(state, src=0, group=native_checkpoint.agreement_group())
        if state[0]:
            break
    native_checkpoint.gather_answers(None, CheckpointError(problem) if problem else None)


def _converter(path: Path, saved: Description) -> Iterator[bool]:
    """Run ds_to_universal. Yield False while it runs, and True when it has finished.

    If it fails, raise OSError, or CheckpointError with the last lines of its output.
    """
    saved_by, loaded_by = counted(saved.world_size, "rank"), counted(dist.get_world_size(), "rank")
    say(f"{path.name} was saved by {saved_by}: converting it once, to load it on {loaded_by}")
    with tempfile.TemporaryDirectory(prefix=".universal-", dir=path) as temporary:
        log, made = Path(temporary, "log"), Path(temporary, UNIVERSAL)
        arguments = ["--input_folder", str(path / NATIVE), "--output_folder", str(made), "--inject_missing_state"]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *arguments],
                env=os.environ | {"DS_ACCELERATOR": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        try:
            while process.poll() is None:
                yield False
                time.sleep(POLL_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            last = "\n  ".join(log.read_text(errors="replace").splitlines()[-4:])
            raise CheckpointError(
                f"ds_to_universal failed with exit status {process.returncode} for {path}:\n  {last}", quoted=last
            )
        for inner, _, names in os.walk(made):
            for name in [".", *names]:
                checkpoint_folder.sync(Path(inner, name))
        if not (path / UNIVERSAL).is_dir():
            made.rename(path / UNIVERSAL)
    yield True
