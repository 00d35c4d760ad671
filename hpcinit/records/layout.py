"""Computes how many ranks each kind of parallelism uses. It doesn't import torch, so it also runs on login nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hpcinit.base.errors import RequestError
from hpcinit.base.text import counted

# Outermost first: adjacent ranks differ in the last dimension, so tensor parallel groups stay inside a node.
# torchtitan's ParallelDims has the same order.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
CP_KINDS = ("ulysses", "ring")


@dataclass(frozen=True)
class Layout:
    """How many ranks each kind of parallelism uses. Each number is called a degree.

    At most one degree may be -1. over(world_size) replaces it with the number of ranks that remain. Raise RequestError
    if two degrees are -1, or if a degree is 0 or below -1.

    Attributes:
        pp: pipeline parallel degree.
        dp_replicate: data parallel degree with replicated parameters.
        dp_shard: data parallel degree with sharded parameters.
        cp: context (sequence) parallel degree.
        tp: tensor parallel degree.
        ep: expert parallel degree. These ranks are taken from dp_shard if dp_shard is above 1, else from dp_replicate.
        cp_kind: 'ulysses' (all-to-all over the heads) or 'ring'.
        tp_across_nodes: whether tensor parallel groups may span nodes.
    """

    pp: int = 1
    dp_replicate: int = -1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    cp_kind: str = "ulysses"
    tp_across_nodes: bool = False

    def __post_init__(self) -> None:
        if self.ep < 1:
            raise RequestError(f"parallel.ep is {self.ep}, expected 1 or more")
        if self.cp_kind not in CP_KINDS:
            raise RequestError(f"parallel.cp_kind is {self.cp_kind!r}, expected one of: {', '.join(CP_KINDS)}")
        for name, degree in self.degrees().items():
            if degree < 1 and degree != -1:
                raise RequestError(f"parallel.{name} is {degree}, expected 1 or more, or -1 for the remaining ranks")
        self._check_experts()
        if len(self._open()) > 1:
            raise RequestError(f"parallel.{' and parallel.'.join(self._open())} are -1, but only one of them may be -1")

    def _check_experts(self) -> None:
        name = "dp_replicate" if self.dp_shard == 1 else "dp_shard"
        degree = getattr(self, name)
        if degree != -1 and degree % self.ep:
            near = " or ".join(f"parallel.ep={ep}" for ep in divisors_around(degree, self.ep))
            raise RequestError(
                f"parallel.ep is {self.ep}, expected a divisor of parallel.{name}={degree}, because experts are "
                f"sharded over these ranks: {near}"
            )

    def degrees(self) -> dict[str, int]:
        """Return the degree of each dimension, outermost dimension first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    @property
    def data_parallel(self) -> int:
        """Return how many groups of ranks process different samples: dp_replicate x dp_shard. No degree may be -1."""
        return self.dp_replicate * self.dp_shard

    def _open(self) -> list[str]:
        return [name for name, degree in self.degrees().items() if degree == -1]

    def over(self, world_size: int, ranks_per_node: int | None = None) -> Layout:
        """Replace the degree that is -1, so that the product of all degrees is world_size, and return the new layout.

        If no value gives this product, raise RequestError. Its message shows why, as an equation, and the nearest valid
        layout.

        Args:
            world_size: the number of ranks.
            ranks_per_node: the number of ranks on each node, or None if unknown or not the same on all nodes. If given,
                over() checks whether each tensor parallel group fits into a node.
        """
        full = self._filled(world_size)
        if full is None:
            raise RequestError(self._unequal(world_size, ranks_per_node))
        if ranks_per_node and not full.tp_across_nodes and ranks_per_node % full.tp:
            near = " or ".join(f"parallel.tp={tp}" for tp in divisors_around(ranks_per_node, full.tp))
            raise RequestError(
                f"tp {full.tp} does not divide the {counted(ranks_per_node, 'rank')} of a node, and tensor parallel "
                f"groups must stay inside a node: {near}, or parallel.tp_across_nodes=true"
            )
        return full

    def _filled(self, world_size: int) -> Layout | None:
        """Return the layout with every degree filled in, or None if the product of the degrees cannot be world_size.

        Raise RequestError if the expert parallel degree is invalid for the filled-in degrees.
        """
        rest, remainder = divmod(world_size, math.prod(degree for degree in self.degrees().values() if degree != -1))
        if remainder or not rest or (rest > 1 and not self._open()):
            return None
        known: dict[str, Any] = dict.fromkeys(self._open(), rest)
        return replace(self, **known)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of a rank in each dimension.

        The last dimension varies fastest, as in torch's init_device_mesh.

        Raise RequestError if a degree is -1, or if the rank does not exist.

        Args:
            rank: 0 to world_size - 1.
        """
        world_size = math.prod(self.degrees().values())
        if self._open() or not 0 <= rank < world_size:
            if self._open():
                raise RequestError(f"parallel.{self._open()[0]} is -1, expected a number: call over(world_size) first")
            raise RequestError(f"rank {rank} does not exist: {self} has {counted(world_size, 'rank')}")
        found = {}
        for name, degree in reversed(self.degrees().items()):
            rank, found[name] = divmod(rank, degree)
        return dict(reversed(found.items()))

    def data_rank(self, rank: int) -> int:
        """Return the number of the share of the data that a rank processes.

        There are dp_replicate x dp_shard shares, numbered from 0. All ranks of a pipeline, context or tensor parallel
        group process the same share. Raise RequestError if a degree is -1, or if the rank does not exist.

        Args:
            rank: 0 to world_size - 1.
        """
        place = self.coordinate(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def _unequal(self, world_size: int, ranks_per_node: int | None) -> str:
        fixed = {name: degree for name, degree in self.degrees().items() if degree != -1}
        product = math.prod(fixed.values())
        per_node = ranks_per_node if ranks_per_node and world_size % ranks_per_node == 0 else None
        have = counted(world_size, "rank")
        if per_node:
            have = f"{counted(world_size // per_node, 'node')} x {counted(per_node, 'rank')} = {world_size}"
        relation = f"which does not divide {have}" if self._open() else f"but {have}"
        changes = [*self._other_degrees(world_size, per_node), *self._other_nodes(product, world_size, per_node)]
        changes = changes or self._other_layout(world_size, per_node)
        return "; ".join([f"{_product(fixed)} = {counted(product, 'rank')}, {relation}", *changes])

    def _other_degrees(self, world_size: int, ranks_per_node: int | None) -> Iterator[str]:
        """Yield changes of a single degree that make the layout valid, such as 'with tp 8: dp_replicate 3'."""
        wanted = self._wanted()
        for name, degree in wanted.items():
            rest, remainder = divmod(world_size, math.prod(d for n, d in wanted.items() if n != name))
            if remainder or not rest:
                continue
            near = divisors_around(rest, degree) if self._open() else [rest]
            near = [one for one in near if self._fits(world_size, ranks_per_node, **{name: one})]
            others = ", ".join(f"{n} {d}" for n, d in wanted.items() if n != name and d > 1)
            if near:
                yield (f"with {others}: " if others else "") + f"{name} {' or '.join(map(str, near))}"

    def _other_nodes(self, product: int, world_size: int, ranks_per_node: int | None) -> list[str]:
        if not ranks_per_node:
            return []
        if self._open():
            step = product // math.gcd(product, ranks_per_node)
            below = world_size // ranks_per_node // step * step
            near = [n for n in (below, below + step) if n]
        else:
            near = [] if product % ranks_per_node else [product // ranks_per_node]
        near = [n for n in near if self._fits(n * ranks_per_node, ranks_per_node)]
        return [f"nodes={' or '.join(map(str, near))}"] if near else []

    def _other_layout(self, world_size: int, ranks_per_node: int | None) -> list[str]:
        """Return the nearest valid layout, as text, or [] if there is none. All degrees may change.

        If no layout with the expert parallel degree (ep) is valid, return one without ep.
        """
        wanted = self._wanted()
        made = [
            dict(zip(wanted, each, strict=False)) for each in _factors(world_size, len(wanted) + bool(self._open()))
        ]
        made.sort(key=lambda each: sum(abs(math.log(each[name] / wanted[name])) for name in wanted))
        for ep in (self.ep, 1):
            for each in made:
                if self._fits(world_size, ranks_per_node, **each, ep=ep):
                    return [f"nearest: {_terms(each | {'ep': 1} if ep != self.ep else each)}"]
        return []

    def _wanted(self) -> dict[str, int]:
        """Return the degrees above 1. If there is no data parallelism and no degree is -1, add dp_replicate."""
        free = not self._open() and self.data_parallel == 1
        return {n: d for n, d in self.degrees().items() if d > 1 or (free and n == "dp_replicate")}

    def _fits(self, world_size: int, ranks_per_node: int | None, **changed: Any) -> bool:
        try:
            full = replace(self, **changed)._filled(world_size)
            return full is not None and bool(full.over(world_size, ranks_per_node))
        except RequestError:
            return False


def divisors_around(number: int, near: int) -> list[int]:
    """Return the divisors of `number` just below and just above `near`. If `near` is a divisor, return only `near`."""
    if number % near == 0:
        return [near]
    below = next(n for n in range(min(near, number), 0, -1) if number % n == 0)
    above = next((n for n in range(near + 1, number + 1) if number % n == 0), None)
    return [below] if above is None else [below, above]


def _factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every ordered tuple of `parts` factors whose product is `number`."""
    if parts == 1:
        yield (number,)
        return
    for one in _divisors(number):
        for others in _factors(number // one, parts - 1):
            yield (one, *others)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def _product(degrees: dict[str, int]) -> str:
    return _terms({name: degree for name, degree in degrees.items() if degree > 1}) or "one rank each"


def _terms(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())
