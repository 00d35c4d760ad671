"""Computes how many samples a training step uses: global batch = micro batch x accumulation x data parallel size.

DeepSpeed uses the same formula (train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data
parallel size). All ranks of a pipeline, context or tensor parallel group process the same samples. The data parallel
size is the number of such groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcinit.base.errors import RequestError
from hpcinit.records.layout import divisors_around


@dataclass(frozen=True)
class Batch:
    """The batch sizes of one training step. Raise RequestError if a number is below 1.

    micro: how many samples a rank processes in one forward pass.
    accumulation: how many forward passes a rank runs per step.
    data_parallel: how many groups of ranks process different samples.
    """

    micro: int
    accumulation: int
    data_parallel: int

    def __post_init__(self) -> None:
        for key, value in (("micro", self.micro), ("accumulation", self.accumulation)):
            _at_least_one(f"batch.{key}", value)

    @property
    def total(self) -> int:
        """Return the global batch: how many samples all ranks together process in one step."""
        return self.micro * self.accumulation * self.data_parallel

    def equation(self) -> str:
        """Return the equation as text, such as 'micro 4 x accumulation 2 x data parallel 8 = 64'."""
        return (
            f"micro {self.micro} x accumulation {self.accumulation} x data parallel {self.data_parallel} = {self.total}"
        )


def solve(micro: int | None, accumulation: int | None, total: int | None, data_parallel: int) -> Batch:
    """Compute the missing batch size from the other two, and return the Batch.

    If only micro or only the global batch is given, accumulation becomes 1. If only accumulation is given, micro
    becomes 1. If the sizes don't divide evenly, raise RequestError with the nearest values that work.
    """
    for key, value in (("micro", micro), ("accumulation", accumulation), ("global", total)):
        if value is not None:
            _at_least_one(f"batch.{key}", value)
    if total is None:
        return Batch(micro or 1, accumulation or 1, data_parallel)
    if micro is not None and accumulation is not None:
        batch = Batch(micro, accumulation, data_parallel)
        if batch.total != total:
            raise RequestError(
                f"batch.global is {total}, but {batch.equation()}: remove one of batch.micro, batch.accumulation and "
                f"batch.global, or set batch.global={batch.total}"
            )
        return batch
    key, given = ("micro", micro) if micro is not None else ("accumulation", accumulation or 1)
    quotient, rest = divmod(total, given * data_parallel)
    if rest:
        raise RequestError(_indivisible(key, given, total, data_parallel))
    return Batch(given, quotient, data_parallel) if key == "micro" else Batch(quotient, given, data_parallel)


def _indivisible(key: str, given: int, total: int, data_parallel: int) -> str:
    unit = given * data_parallel
    near = [n for n in (total // unit * unit, -(-total // unit) * unit) if n]
    changes = [f"batch.global={' or '.join(map(str, near))}"]
    per_rank, rest = divmod(total, data_parallel)
    if not rest:
        changes.append(f"batch.{key}={' or '.join(map(str, divisors_around(per_rank, given)))}")
    return (
        f"batch.global {total} is not a multiple of {key} {given} x data parallel {data_parallel} = {unit}; "
        f"nearest values that work: {', or '.join(changes)}"
    )


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise RequestError(f"{key} is {value}, expected 1 or more")
