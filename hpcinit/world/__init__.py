"""Defines World: the rank of this process, the number of ranks, this rank's host and the host of rank 0.

All values are read from the variables of one launcher. Otherwise, a stale `RANK` could be combined with the current
`SLURM_LOCALID`, and nothing would fail until a collective hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcinit.base.errors import WorldError


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks. The values of a World never contradict each other.

    Raise WorldError if the given values contradict each other.

    Attributes:
        launcher: the launcher whose variables were read, such as 'slurm'.
        rank: 0 to world_size - 1.
        world_size: the number of ranks.
        local_rank: 0 to local_world_size - 1, among the ranks of this node.
        local_world_size: the number of ranks on this node.
        node_rank: the index of this node in `hosts`.
        hosts: node names in the order of node_rank; empty if the launcher does not name them (torchrun).
        master_addr: the host of rank 0.
        master_ports: candidates for rank 0's port, in order of preference.
        job: the unique name of this attempt (job, step, restart). Ports and nonces depend on it.
        warnings: contradicting values of other launchers in the environment, one sentence each.
        master_known: False if the launcher does not show which host is rank 0's. Then the order of `hosts` and
            master_addr are guesses. Only rank 0 itself has the right master_addr, and must publish it.
        node_count: the number of nodes if the launcher counts them without naming them; else 0.
        ranks_here: all ranks of this node; empty if the launcher does not name them.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    hosts: tuple[str, ...]
    master_addr: str
    master_ports: tuple[int, ...]
    job: str = ""
    warnings: tuple[str, ...] = ()
    master_known: bool = True
    node_count: int = 0
    ranks_here: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _within("rank", self.rank, "world_size", self.world_size)
        _within("local_rank", self.local_rank, "local_world_size", self.local_world_size)
        if self.local_world_size > self.world_size:
            raise WorldError(
                f"local_world_size {self.local_world_size} is more than world_size {self.world_size} (launcher: "
                f"{self.launcher})"
            )
        if self.hosts:
            _within("node_rank", self.node_rank, "number of hosts", len(self.hosts))
        if not self.master_ports:
            raise WorldError("no port for the rendezvous: master_ports is empty, expected at least one")

    @property
    def nodes(self) -> int:
        """Return the number of nodes.

        If the launcher neither names nor counts them, compute it from the numbers of ranks.
        """
        return len(self.hosts) or self.node_count or -(-self.world_size // self.local_world_size)

    @property
    def host(self) -> str:
        """Return the name of this rank's node, or '' if the launcher does not name the nodes."""
        return self.hosts[self.node_rank] if self.hosts else ""


def _within(name: str, value: int, size_name: str, size: int) -> None:
    if not 0 <= value < size:
        raise WorldError(f"{name} is {value}, expected 0 to {size - 1} ({size_name} is {size})")


def number(env: Mapping[str, str], key: str, advice: str) -> int:
    """Return the variable `key` as a whole number. If it is missing or not a number, raise WorldError with `advice`."""
    text = env.get(key)
    if text is None:
        raise WorldError(f"{key} is not set, expected a number: {advice}")
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{key} is {text!r}, expected a number: {advice}") from None


# This variable shows that hpcinit, not the user, has set MASTER_ADDR and MASTER_PORT. Their values may differ from the
# address and ports that read() returns.
ENV_WORLD = "HPCINIT_WORLD"


def exports(world: World) -> dict[str, str]:
    """Return the environment variables for programs that use torch's `env://` or expect torchrun.

    https://docs.pytorch.org/docs/stable/elastic/run.html lists their names. HPCINIT_WORLD contains World.job, and shows
    that hpcinit has set the other variables for this world.
    """
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "GROUP_RANK": str(world.node_rank),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_ports[0]),
        ENV_WORLD: world.job,
    }
