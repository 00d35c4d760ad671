"""How the ranks are divided among the kinds of parallelism; arithmetic only, so it runs on a login node."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hpcinit.facts.errors import RequestError

# Outermost first: neighbours in the last dimension are neighbouring ranks, so tensor parallel groups
# stay inside a node. The order is that of torchtitan's ParallelDims.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """Degrees of pipeline, replicated and sharded data, context and tensor parallelism.

    At most one may be -1: what is left over. `over(world_size)` puts the number in its place.
    Raises RequestError for a degree of 0 or below -1, or for two that are -1.
    """

    pp: int = 1
    dp_replicate: int = -1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree < 1 and degree != -1:
                raise RequestError(f"parallel.{name} is {degree}, expected 1 or more, or -1 for what is left")
        if len(self._open()) > 1:
            raise RequestError(
                f"parallel.{' and parallel.'.join(self._open())} are -1, expected at most one to be left open"
            )

    def degrees(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DIMENSIONS}

    def _open(self) -> list[str]:
        return [name for name, degree in self.degrees().items() if degree == -1]

    def over(self, world_size: int) -> Layout:
        """The same layout with every degree known, product == world_size.

        Raises RequestError with the equation that does not hold.
        """
        fixed = {name: degree for name, degree in self.degrees().items() if degree != -1}
        product = math.prod(fixed.values())
        if self._open() and world_size % product == 0 and world_size >= product:
            return replace(self, **{self._open()[0]: world_size // product})
        if not self._open() and product == world_size:
            return self
        equation = " x ".join(f"{name} {degree}" for name, degree in fixed.items() if degree > 1) or "1"
        expected = "a divisor of" if self._open() else "equal to"
        raise RequestError(
            f"{equation} = {product} ranks is not {expected} the {world_size} ranks there are "
            f"({self._fitting(world_size)})"
        )

    def coordinate(self, rank: int) -> dict[str, int]:
        """The rank's place in each dimension: the last one counts fastest, as in torch's init_device_mesh.

        Raises RequestError if a degree is still open, or if there is no such rank.
        """
        world_size = math.prod(self.degrees().values())
        if self._open() or not 0 <= rank < world_size:
            have = f"parallel.{self._open()[0]} is -1, use over(world_size)" if self._open() else f"{world_size} ranks"
            raise RequestError(f"rank {rank} has no place in {self}: {have}")
        found = {}
        for name, degree in reversed(self.degrees().items()):
            rank, found[name] = divmod(rank, degree)
        return dict(reversed(found.items()))

    def data_rank(self, rank: int) -> int:
        """Which share of the data the rank works on, of dp_replicate x dp_shard shares.

        One share belongs to all ranks of a pipeline, context and tensor parallel group. Raises RequestError.
        """
        place = self.coordinate(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def _fitting(self, world_size: int) -> str:
        """What would fit with all other degrees as they are, for the message."""
        tried = [name for name, degree in self.degrees().items() if degree > 1] or ["dp_replicate"]
        ways = []
        for name in tried:
            rest = math.prod(d for n, d in self.degrees().items() if n != name and d != -1)
            if world_size % rest == 0:
                largest = world_size // rest
                ways.append(f"parallel.{name}={largest}" + (" or a divisor of it" if self._open() else ""))
        return "fits: " + ", ".join(ways) if ways else "no single degree mends it"
