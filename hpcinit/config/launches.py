"""How the ranks are started: what each kind can be told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcinit.config.schema import Config

# What a node's task can do for its ranks by itself; srun's other ways need to know where the devices are.
CPU_BIND = r"none|mask_cpu:[0-9a-fA-Fx,]+|map_cpu:[0-9a-fA-Fx,]+|cores|threads"
GPU_BIND = r"none|single:1|per_task:\d+|map_gpu:[\d,]+"


def problems(config: Config) -> Iterator[str]:
    """A message for each key that its kind cannot follow."""
    launch = config.launch
    for name in launch.preload:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            yield f"launch.preload has {name!r}, expected the name of a module, as in transformers or my.models"
    if launch.max_restarts > 0 and launch.kind != "torchrun":
        yield (
            f"launch.max_restarts is {launch.max_restarts}, but launch.kind is {launch.kind}: launch=torchrun, or "
            "restart.budget"
        )
    if launch.kind == "srun":
        return
    for key, value, known in (("cpu_bind", launch.cpu_bind, CPU_BIND), ("gpu_bind", launch.gpu_bind, GPU_BIND)):
        if value and not re.fullmatch(rf"(?:(?:quiet|verbose|q|v),)?(?:{known})", value):
            names = ", ".join(word.partition(":")[0] for word in known.split("|"))
            yield (
                f"launch.{key} is {value!r}, but launch.kind is {launch.kind}, whose ranks are bound without Slurm, "
                f"expected one of: {names}, null; or launch=srun"
            )
