"""Which rank am I, of how many, on which host, and where is the master.

One launcher is chosen and every value comes from it. Resolving each variable on its own lets a stale
`RANK` mix with a live `SLURM_LOCALID`: nothing fails until a collective hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpcinit.base.errors import WorldError


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks. A World that exists is consistent.

    rank: 0 to world_size - 1. local_rank: 0 to local_world_size - 1, among the ranks of this node.
    hosts: node names in the order of node_rank; empty where the launcher does not tell (torchrun).
    master_addr: the host of rank 0. master_ports: candidates in order of preference.
    job: what names this start of this job and no other (job, step, restart), for ports and nonces.
    warnings: values of other launchers in the environment that contradict these, one sentence each.
    master_known: False where this rank cannot tell for sure who hosts rank 0. master_addr is then a guess, the
        order of hosts another, and rank 0, whose master_addr is its own host, must publish it.
    node_count: the number of nodes where the launcher counts them without naming them; else 0.

    Raises WorldError if the values contradict each other.
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

    def __post_init__(self) -> None:
        _within("rank", self.rank, "world_size", self.world_size)
        _within("local_rank", self.local_rank, "local_world_size", self.local_world_size)
        if self.local_world_size > self.world_size:
            raise WorldError(
                f"local_world_size {self.local_world_size} is more than world_size {self.world_size}, "
                f"as read from {self.launcher}"
            )
        if self.hosts:
            _within("node_rank", self.node_rank, "number of hosts", len(self.hosts))
        if not self.master_ports:
            raise WorldError("no port to meet at: master_ports is empty")

    @property
    def nodes(self) -> int:
        """Number of nodes; where the launcher does not name them, counted from the sizes."""
        return len(self.hosts) or self.node_count or -(-self.world_size // self.local_world_size)

    @property
    def host(self) -> str:
        """This rank's node name, or '' where the launcher does not tell."""
        return self.hosts[self.node_rank] if self.hosts else ""


def _within(name: str, value: int, size_name: str, size: int) -> None:
    if not 0 <= value < size:
        raise WorldError(f"{name} is {value}, expected 0 to {size - 1} ({size_name} is {size})")


def number(env: Mapping[str, str], key: str, do: str) -> int:
    """`env[key]` as an int. Raises WorldError that says `do` when it is absent or no number."""
    text = env.get(key)
    if text is None:
        raise WorldError(f"{key} is not set, expected a number: {do}")
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{key} is {text!r}, expected a number: {do}") from None


# With it, hpcinit knows MASTER_ADDR and MASTER_PORT again as its own: they may name another address or port
# than a second look would choose, and are not the user's.
ENV_WORLD = "HPCINIT_WORLD"


def exports(world: World) -> dict[str, str]:
    """The variables of torch's `env://` and of torchrun, so that scripts written for either just run.

    Names: https://docs.pytorch.org/docs/stable/elastic/run.html (environment variables). One is our own and says
    to whom the others belong: HPCINIT_WORLD, the world's job.
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
