"""Reads the world of ranks from torch's variables. torchrun sets them, and so do other programs that start ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpcinit.base.errors import WorldError
from hpcinit.records import elastic_restarts
from hpcinit.world import ENV_WORLD, World, number, ports
from hpcinit.world.launchers import slurm_step
from hpcinit.world.launchers.slurm_step import UNKNOWN, Process

ENV_AGENT = "HPCINIT_AGENT"  # World.job of the agents; set for ranks that an agent of launch=torchrun has started


class Torchrun:
    """torchrun (`python -m torch.distributed.run`), or a launcher that is based on it, such as accelerate.

    Variables: https://docs.pytorch.org/docs/stable/elastic/run.html. With launch=torchrun, a Slurm step runs one agent
    per node, which sets HPCINIT_AGENT. The variables of this step then name the hosts.
    """

    NAME = "torchrun"
    VARIABLES: Mapping[str, str] = {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE",
    }
    DO = "torchrun sets it for every worker; start the ranks with torchrun"

    def present(self, env: Mapping[str, str]) -> bool:
        """Return whether torchrun started this process.

        RANK alone does not show it, because it may be stale. torchrun always sets its run id, too.
        """
        return "TORCHELASTIC_RUN_ID" in env

    def by_our_agent(self, env: Mapping[str, str]) -> bool:
        """Return whether an agent of launch=torchrun started this rank, and not a torchrun inside of such a rank."""
        return self.present(env) and env.get(ENV_AGENT) == env["TORCHELASTIC_RUN_ID"]

    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World:
        """Return the world. torchrun's own variables count the hosts but do not name them."""
        if self.by_our_agent(env):
            # The agents' Slurm step names the hosts and rank 0's host. Each restart round has its own ports.
            agents = slurm_step.read(env, process)
            job = elastic_restarts.round_folder(agents.job, number(env, "TORCHELASTIC_RESTART_COUNT", self.DO))
            candidates = ports.candidate_ports(job)
            return replace(agents, launcher=self.NAME, job=job, master_ports=candidates, **self._ranks(env))
        address = env.get("MASTER_ADDR")
        if not address:
            raise WorldError(f"MASTER_ADDR is not set, expected rank 0's host: {self.DO}")
        return World(
            launcher=self.NAME,
            **self._ranks(env),
            node_rank=number(env, "GROUP_RANK", self.DO),
            hosts=(),
            master_addr=address,
            master_ports=(number(env, "MASTER_PORT", self.DO),),
            job=self._job(env, address),
            node_count=number(env, "GROUP_WORLD_SIZE", self.DO) if "GROUP_WORLD_SIZE" in env else 0,
        )

    def _ranks(self, env: Mapping[str, str]) -> dict[str, Any]:
        """Return rank, world_size, local_rank, local_world_size and ranks_here."""
        found = {name: number(env, variable, self.DO) for name, variable in self.VARIABLES.items()}
        first = found["rank"] - found["local_rank"]
        return {**found, "ranks_here": tuple(range(first, first + found["local_world_size"]))}

    def _job(self, env: Mapping[str, str], address: str) -> str:
        """Return 'RUN.RESTART'. RUN is torchrun's run id.

        Without --rdzv-id, every run has the id 'none'. RUN then also contains the store's address and port, so that two
        runs on the same nodes have different names.
        """
        run = env.get("TORCHELASTIC_RUN_ID", "")
        if run in {"", "none"}:
            run = f"none-{address}-{env.get('MASTER_PORT', '')}"
        return f"{run}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


class TorchVariables:
    """A program or launcher that sets torch's variables and no others, such as Ray, DeepSpeed or Kubernetes.

    It is detected if all of torch's variables are set and no other launcher is present. Inside a Slurm step, the
    variables may be stale, so set HPCINIT_STARTED_BY=env, or call init(started_by='env'), to use them.
    """

    NAME = "env"
    VARIABLES: Mapping[str, str] = Torchrun.VARIABLES
    DO = "with the launcher 'env' you must set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"

    def present(self, env: Mapping[str, str]) -> bool:
        """Return whether torch's variables are complete and not inherited from a rank of hpcinit."""
        return self.many(env) and bool(env.get("LOCAL_RANK")) and ENV_WORLD not in env

    def many(self, env: Mapping[str, str]) -> bool:
        """Return whether torch's variables are complete and describe more than one rank."""
        complete = all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        return complete and env["WORLD_SIZE"] != "1"

    def read(self, env: Mapping[str, str], process: Process = UNKNOWN) -> World:
        """Return the world from torch's five variables and LOCAL_WORLD_SIZE.

        If LOCAL_WORLD_SIZE is not set, all ranks are on this node.
        """
        address = env.get("MASTER_ADDR")
        if not address:
            raise WorldError(f"MASTER_ADDR is not set, expected rank 0's host: {self.DO}")
        rank, size = number(env, "RANK", self.DO), number(env, "WORLD_SIZE", self.DO)
        local_size = number(env, "LOCAL_WORLD_SIZE", self.DO) if "LOCAL_WORLD_SIZE" in env else size
        port = number(env, "MASTER_PORT", self.DO)
        return World(
            launcher=self.NAME,
            rank=rank,
            world_size=size,
            local_rank=number(env, "LOCAL_RANK", self.DO),
            local_world_size=local_size,
            node_rank=number(env, "GROUP_RANK", self.DO) if "GROUP_RANK" in env else rank // max(local_size, 1),
            hosts=(),
            master_addr=address,
            master_ports=(port,),
            job=f"{address}:{port}",
        )


torchrun, torch_variables = Torchrun(), TorchVariables()
