"""DeepSpeed's own checkpoints; with other ranks than those that wrote one, through its universal format."""

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
from hpcinit.runtime.checkpoint import checkpoint_folder as of_steps
from hpcinit.runtime.checkpoint import native_checkpoint
from hpcinit.runtime.checkpoint.checkpoint_folder import Description

NATIVE, UNIVERSAL = "deepspeed", "universal"
POLL_S = 0.5


def save(engine: Any, folder: Path) -> list[str]:
    """The files that this rank wrote into `folder`. Raises CheckpointError, on every rank if it does so on one."""
    with _noted(engine) as noted:
        engine.save_checkpoint(str(folder), tag=NATIVE, save_latest=False)
    native_checkpoint.gather_answers(None, noted.error)
    return [path.relative_to(folder).as_posix() for path in noted.written if path.exists()]


def load(engine: Any, path: Path, saved: Description, tp: int) -> None:
    """Into a fresh engine. Raises RequestError for ZeRO stages that do not go together, CheckpointError."""
    stage = int(engine.zero_optimization_stage())
    tag = UNIVERSAL if _must_convert(saved, stage, dist.get_world_size(), tp) else NATIVE
    if tag == UNIVERSAL and not native_checkpoint.on_rank_0((path / UNIVERSAL).is_dir):
        _convert(path, saved)
    config, before = engine._config, engine._config.load_universal_checkpoint
    config.load_universal_checkpoint = tag == UNIVERSAL  # what {"checkpoint": {"load_universal": true}} sets
    try:
        found, _ = engine.load_checkpoint(str(path), tag=tag)
    finally:
        config.load_universal_checkpoint = before
    if found is None:
        raise CheckpointError(f"DeepSpeed found no checkpoint in {path / tag}, and said why above")


def _must_convert(saved: Description, stage: int, world_size: int, tp: int) -> bool:
    """Whether the ranks hold other parts than those that wrote it. Raises RequestError."""
    was = saved.zero_stage or 0
    if was != stage and (min(was, stage) == 0 or max(was, stage) == 3):
        raise RequestError(
            f"the checkpoint of step {saved.step} was written with deepspeed.zero_stage {was}, and it is {stage}: "
            f"DeepSpeed goes from 1 to 2 and back only; deepspeed.zero_stage={was}"
        )
    if (saved.world_size, saved.layout["tp"], was) == (world_size, tp, stage):
        return False
    return bool(stage) or saved.layout["tp"] != tp  # in stage 0 every rank has everything


class _Noted:
    """In the place of DeepSpeed's checkpoint engine: each file on the disk, and an error kept instead of raised.

    A rank that raised within save_checkpoint would leave the others waiting for it in DeepSpeed's barrier.
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
                of_steps.sync(path)
            self.written += paths
        except Exception as error:
            self.error = self.error or error


@contextmanager
def _noted(engine: Any) -> Iterator[_Noted]:
    inner, noted = engine.checkpoint_engine, _Noted(engine.checkpoint_engine)
    if inner.is_decoupled():
        raise RequestError(
            "deepspeed.ds_config asks for a checkpoint writer that goes on in the background, and a checkpoint is "
            "named when all of it is on the disk: take 'checkpoint': {'writer': ...} out"
        )
    copy = engine._copy_recovery_script  # zero_to_fp32.py, by rank 0
    engine.checkpoint_engine = noted
    engine._copy_recovery_script = lambda path: noted.keep(lambda: copy(path))
    try:
        yield noted
    finally:
        engine.checkpoint_engine = inner
        del engine._copy_recovery_script


def _convert(path: Path, saved: Description) -> None:
    """DeepSpeed's ds_to_universal, by rank 0, in a process of its own: it forks, and takes memory. Kept for the next.

    The others ask every moment, so that no collective waits for as long as it takes. Raises CheckpointError.
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
        if dist.get_world_size() > 1:  # else the group is the default one, and NCCL's takes no tensor of the CPU
            dist.broadcast(state, src=0, group=native_checkpoint.agreement_group())
        if state[0]:
            break
    native_checkpoint.gather_answers(None, CheckpointError(problem) if problem else None)


def _converter(path: Path, saved: Description) -> Iterator[bool]:
    """False while it runs, then True. Raises OSError, CheckpointError with the last lines of what it printed."""
    say(f"{path.name} was written by {saved.world_size} ranks: made universal for {dist.get_world_size()}, once")
    with tempfile.TemporaryDirectory(prefix=".universal-", dir=path) as temporary:
        log, made = Path(temporary, "log"), Path(temporary, UNIVERSAL)
        words = ["--input_folder", str(path / NATIVE), "--output_folder", str(made), "--inject_missing_state"]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words],
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
            raise CheckpointError(f"ds_to_universal ended with {process.returncode} for {path}:\n  {last}", quoted=last)
        for inner, _, names in os.walk(made):
            for name in [".", *names]:
                of_steps.sync(Path(inner, name))
        if not (path / UNIVERSAL).is_dir():
            made.rename(path / UNIVERSAL)
    yield True
