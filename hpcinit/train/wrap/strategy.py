"""Defines the interface that each value of `parallel.wrap` implements with torch."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from hpcinit.records.batch import Batch
from hpcinit.records.layout import Layout
from hpcinit.records.spec import Training
from hpcinit.train.wrap.sequence import Attention
from hpcinit.train.wrap.wrapped import MakeOptimizer, Wrapped


@dataclass(frozen=True)
class Inputs:
    """The arguments of run.wrap(), together with the settings of the run."""

    model: nn.Module
    mesh: DeviceMesh
    layout: Layout
    device: torch.device
    batch: Batch
    training: Training
    optimizer: MakeOptimizer | None
    tp_plan: Mapping[str, ParallelStyle] | None
    blocks: Sequence[nn.Module] | None
    mpu: Any


class Strategy(abc.ABC):
    """Makes models trainable with one wrapper, such as DDP. It has no state, so one object is used for all models."""

    @abc.abstractmethod
    def check(self, inputs: Inputs) -> None:
        """Raise RequestError if the inputs cannot be combined with this wrapper."""

    @abc.abstractmethod
    def wrap(self, inputs: Inputs, attention: Attention) -> Wrapped:
        """Wrap the model and return it.

        Raise RequestError if the wrapper does not support the request, and BringUpError if DeepSpeed cannot start.
        """
