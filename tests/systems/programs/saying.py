"""The results of this folder's programs for the test: a line of JSON from each rank."""

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

warnings.simplefilter("ignore")  # DeepSpeed warns of deprecated calls at each collective


def say(folder: str | Path, run: hpcinit.Runtime, **found: Any) -> None:
    """Write the result into a file per rank, because launchers treat output differently."""
    place = {"rank": run.rank, "local_rank": run.local_rank, "world": run.world_size, "launcher": run.world.launcher}
    (Path(folder) / f"said-{run.rank}.json").write_text(json.dumps({**place, **found}))


def refusal(call: Any, *args: Any, **options: Any) -> str:
    """Return the message of hpcinit's error, or ''."""
    try:
        call(*args, **options)
    except hpcinit.HpcinitError as error:
        return str(error)
    return ""


def draws() -> list[float]:
    """Return one number of each seeded generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def bits(tensors: Iterable[Tensor]) -> str:
    """Return a checksum of whole tensors, without rounding."""
    whole = (each.full_tensor() if isinstance(each, DTensor) else each for each in tensors)
    return hashlib.sha256(b"".join(each.detach().cpu().float().numpy().tobytes() for each in whole)).hexdigest()[:16]


def numbers(model: nn.Module) -> list[float]:
    """Return all parameters, gathered, as one list."""
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([p.detach().float().flatten() for p in whole]).tolist()
