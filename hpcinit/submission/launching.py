"""The line of the batch script that starts the ranks: srun, its options, and the words that each task runs.

    launch=srun      a task per rank                python -m hpcinit.run SPEC
    launch=fork      a task per node, its ranks' parent    python -m hpcinit.fork SPEC
    launch=torchrun  a task per node, an elastic agent     python -m hpcinit.elastic SPEC

On cluster=local `python -m hpcinit.local.step` stands in the place of srun, with the same options.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpcinit.config import environments
from hpcinit.config.job_spec import cpus_per_rank, gpu_bind
from hpcinit.config.partition import ranks_per_node
from hpcinit.config.schema import Config
from hpcinit.facts import quoting, runfolder
from hpcinit.facts.options import flags
from hpcinit.submission import chain, container, restart, to_local

ENTRIES = {"srun": "hpcinit.run", "fork": "hpcinit.fork", "torchrun": "hpcinit.elastic"}


def step(config: Config, folder: Path, workdir: Path) -> str:
    """The line that starts the ranks of the run in `folder`, with what follows it."""
    python = environments.python(config)
    here = sys.executable if config.container.image else python
    launcher = ["srun"] if config.cluster.engine == "slurm" else [here, "-m", "hpcinit.local.step"]
    options = {**_options(config, folder), **container.of_srun(config, folder, workdir), **config.cluster.srun}
    if config.launch.env_to_local:
        python = to_local.PYTHON
    run = [python, "-u", "-m", ENTRIES[config.launch.kind], str(folder / runfolder.SPEC)]
    words = [*launcher, *flags(options), *container.before_python(config, folder, workdir), *run]
    line = " ".join(word if word == to_local.PYTHON else quoting.shell(word) for word in words)
    return to_local.around(restart.around(chain.around(line, config.chain), config), config)


def _options(config: Config, folder: Path) -> dict[str, Any]:
    """Of srun. A task of a node binds its ranks itself: what it is given is for all of them."""
    ranks, cores, launch = ranks_per_node(config), cpus_per_rank(config), config.launch
    alone = launch.kind == "srun"
    return {
        "nodes": config.nodes,
        "ntasks": config.nodes * (ranks if alone else 1),
        "ntasks-per-node": ranks if alone else 1,
        # Stated again: srun of Slurm 22.05 to 23.02 does not inherit it from sbatch.
        "cpus-per-task": cores if alone or cores is None else cores * ranks,
        # With SLURM_EXPORT_ENV=NONE (sbatch --export=NONE, some sites' profiles) the ranks would get no environment.
        "export": "ALL",
        # A site's MpiDefault may need a library that the nodes lack. cluster.srun.mpi chooses another type.
        "mpi": None if config.comm.backend == "mpi" else "none",
        "kill-on-bad-exit": int(launch.kill_on_bad_exit),
        "wait": launch.wait_s,
        "cpu-bind": launch.cpu_bind if alone else launch.cpu_bind and "none",
        "gpu-bind": gpu_bind(config) if alone else None,
        "unbuffered": True,
        "open-mode": "append",  # a requeued job must not overwrite what the first attempt wrote
        # What a node's task says goes to the job's log; it opens the logs of its ranks.
        "output": quoting.pattern(str(folder / runfolder.LOGS)) + "/rank-%t.log" if alone else None,
    }
