"""What the programs of this folder tell the test: a line of JSON from each rank."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hpcinit

warnings.simplefilter("ignore")  # DeepSpeed's of deprecated calls, one at each collective


def say(folder: str | Path, run: hpcinit.Runtime, **found: Any) -> None:
    """In a file of this rank's own, since launchers differ in what they do to output."""
    place = {"rank": run.rank, "local_rank": run.local_rank, "world": run.world_size, "launcher": run.world.launcher}
    (Path(folder) / f"said-{run.rank}.json").write_text(json.dumps({**place, **found}))


def refusal(call: Any, *args: Any, **options: Any) -> str:
    """The message of hpcinit's error; '' if there was none."""
    try:
        call(*args, **options)
    except hpcinit.HpcinitError as error:
        return str(error)
    return ""


def draws() -> list[float]:
    """One number of each generator that is seeded."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def bits(tensors: Iterable[Tensor]) -> str:
    """A checksum of whole tensors; rounding cannot hide a difference."""
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in tensors)
    return hashlib.sha256(b"".join(each.detach().cpu().float().numpy().tobytes() for each in whole)).hexdigest()[:16]


def numbers(model: nn.Module) -> list[float]:
    """All parameters, whole, as one list."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([p.detach().float().flatten() for p in whole]).tolist()
