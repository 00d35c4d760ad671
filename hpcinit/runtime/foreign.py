"""A process group that somebody else made: taken as it is if it is the one asked for, and never destroyed from here."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from hpcinit.facts.errors import BringUpError
from hpcinit.facts.world import World
from hpcinit.runtime import process_group
from hpcinit.runtime.request import Plan


def adopt(world: World, plan: Plan) -> frozenset[ProcessGroup]:
    """The groups that are there and must stay. Raises BringUpError that names each difference from what is asked."""
    bound = process_group.bound_to()
    wanted_bound = plan.binding.device
    differences = [
        f"its {name} is {found}, and {said} {asked}"
        for name, found, said, asked in (
            ("rank", dist.get_rank(), f"{world.launcher} says", world.rank),
            ("world size", dist.get_world_size(), f"{world.launcher} says", world.world_size),
            ("backend", process_group.backend_on(plan.device) or "none", f"on {plan.device} asked is", plan.backend),
            # A group that is bound to this rank's device, as DeepSpeed's own are, is no worse for not being asked for.
            ("device_id", bound, "this rank's device is", wanted_bound or (bound and plan.device)),
        )
        if found != asked
    ]
    if differences:
        raise BringUpError(
            f"a process group is up that hpcinit did not make, and it is another than init is asked for: "
            f"{'; '.join(differences)}. Call hpcinit.init() in the place of what made it, or ask for what it is"
        )
    return frozenset(c10d._world.pg_map)


def leave(kept: frozenset[ProcessGroup]) -> None:
    """Destroy what was made on top of it (a mesh's groups), and nothing else."""
    for group in [group for group in c10d._world.pg_map if group not in kept]:
        dist.destroy_process_group(group)
