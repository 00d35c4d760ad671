"""One agent's part of a run: it joins the other agents, starts this node's ranks, and reports their failures."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec

from hpcinit.base import background_writer, signals
from hpcinit.base.console import say
from hpcinit.base.process_limits import ENV_PARENT
from hpcinit.base.text import brief
from hpcinit.launch import rank_binding
from hpcinit.launch.torchrun.agent import Agent, Start, Workers
from hpcinit.launch.torchrun.agent_signals import Signals
from hpcinit.launch.torchrun.rendezvous_handler import AgentRendezvous
from hpcinit.records import causes, elastic_restarts, error_records, job_log, run_folder, timeline
from hpcinit.records.elastic_restarts import Restart
from hpcinit.records.spec import Spec
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.rendezvous import startup_events
from hpcinit.runtime import interpreter_exit
from hpcinit.world import World
from hpcinit.world.launchers.torchrun import ENV_AGENT


def run(spec: Spec, path: Path, agents: World, came: Signals) -> int:
    """Run until the ranks of all nodes are done, and return 0, or the exit status of the failed rank. If a signal ended
    that rank, end this process by the same signal. Raise BringUpError if agents are missing."""
    node = Node(spec, path, agents, came)
    worker_spec = WorkerSpec(
        role="default",
        local_world_size=spec.ranks_per_node,
        entrypoint=sys.executable,
        rdzv_handler=node.rendezvous,
        max_restarts=spec.launch.max_restarts,
        monitor_interval=0.1 + spec.nodes / 1000,  # s; each time the agents query the first one's store
    )
    # The number of ranks is the same on all nodes, so torch need not exchange it between the agents.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    agent = Agent(worker_spec, node.rendezvous, came, node.start, node.report)
    failed = agent.run().is_failed()
    if failed and agent.status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # keep the rank's own core file
        signals.end_by(-agent.status)
    interpreter_exit.end(agent.status if failed else 0)
    return agent.status if failed else 0


class Node:
    """What an agent does for the ranks of its node."""

    def __init__(self, spec: Spec, path: Path, agents: World, came: Signals) -> None:
        self._spec, self._path, self._folder, self._agents, self._came = spec, path, path.parent, agents, came
        allowed = os.sched_getaffinity(0)
        self._cpus = rank_binding.cpus(spec.launch, spec.ranks_per_node, allowed, os.environ)
        self._began = startup_events.startup_began()
        self.rendezvous = AgentRendezvous(agents, spec, self._timeout, self._record_restart)

    def start(self) -> Workers:
        """Start the ranks of this node. After a restart, write its reason to the log of each rank."""
        starts = [self._start(local_rank) for local_rank in range(self._spec.ranks_per_node)]
        if why := self.rendezvous.why:
            for start in starts:
                with (
                    background_writer.suppressed("the restart's line in the log of a rank"),
                    start.log.open("a") as log,
                ):
                    print(f"hpcinit: {self._restart_message(why)}", file=log)
        command = [sys.executable, "-u", "-m", "hpcinit.run", str(self._path)]
        return Workers(command, starts, self._came.unblocked)

    def report(self, failures: Mapping[int, int], succeeded: Sequence[int] = ()) -> Sequence[Restart]:
        """Return the failures, from exit statuses by local rank, the cause first; print them before srun reports us.

        succeeded: local ranks that ended with status 0 before."""
        for local_rank in succeeded:
            say(f"{self._agents.host or os.uname().nodename}: rank {self._rank(local_rank)}: {job_log.SUCCEEDED}")
        if not failures:
            return ()
        found = [self._failure(local_rank, status) for local_rank, status in failures.items()]
        first = elastic_restarts.cause(found)
        found = [first, *(one for one in found if one is not first)]
        for one in found:
            say(f"error: {one.host}: rank {one.rank}: {one.how}")
        if first.error:
            say(f"rank {first.rank} on {first.host} failed first on this node: {first.error}")
        return found

    def _failure(self, local_rank: int, status: int) -> Restart:
        rank, job = self._rank(local_rank), self._job()
        records = error_records.read(self._folder / run_folder.ERRORS, f"rank-{rank}.json")
        record = next((one.record for one in records if one.record.job == job), None)
        return Restart(
            job=job,
            number=self.rendezvous.start + 1,
            time=record.time if record else time.time(),
            rank=rank,
            host=self._agents.host or os.uname().nodename,
            how=job_log.how(status),
            error=brief(record.error) if record else "",
            step=elastic_restarts.furthest(self._folder),
            secondary=bool(record and causes.is_secondary(record)),
        )

    def _record_restart(self, why: Restart) -> None:
        """Record the restart: called in the first agent when no rank of the previous start runs any more."""
        with background_writer.suppressed("the folder of old error records"):
            elastic_restarts.set_aside(self._folder, why.job)
        with background_writer.suppressed(run_folder.ELASTIC):
            elastic_restarts.record(self._folder, why)
        say(self._restart_message(why))

    def _restart_message(self, why: Restart) -> str:
        number, most, job = self.rendezvous.start, self._spec.launch.max_restarts, self._agents.job.partition(".")[0]
        where = os.environ.get("SLURM_STEP_NODELIST", "")
        return f"{job_log.NEW_ATTEMPT}elastic restart {number} of at most {most} of job {job} starts on {where}: {why}"

    def _job(self) -> str:
        return elastic_restarts.round_folder(self._agents.job, self.rendezvous.start)

    def _rank(self, local_rank: int) -> int:
        return self._agents.rank * self._spec.ranks_per_node + local_rank

    def _start(self, local_rank: int) -> Start:
        rank, log = self._rank(local_rank), run_folder.RANK_LOG.format(rank=self._rank(local_rank))
        env = {**os.environ, **self._environment(local_rank, rank)}
        env |= rank_binding.devices(self._spec.launch, local_rank, os.environ)
        return Start(env, self._folder / log, None if self._cpus is None else self._cpus[local_rank])

    def _environment(self, local_rank: int, rank: int) -> dict[str, str]:
        """Return torchrun's variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables

        Its error file, for programs that use torch's @record, is in the folder of hpcinit's error records.
        """
        nodes, here = self._spec.nodes, self._spec.ranks_per_node
        return {
            **{"RANK": str(rank), "WORLD_SIZE": str(nodes * here)},
            **{"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(here)},
            **{"GROUP_RANK": str(self._agents.rank), "GROUP_WORLD_SIZE": str(nodes)},
            **{"ROLE_NAME": "default", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(nodes * here)},
            **{"MASTER_ADDR": self._agents.master_addr, "MASTER_PORT": str(self._agents.master_ports[0])},
            "TORCHELASTIC_RUN_ID": self._agents.job,
            "TORCHELASTIC_RESTART_COUNT": str(self.rendezvous.start),
            "TORCHELASTIC_MAX_RESTARTS": str(self._spec.launch.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(self._folder / run_folder.ERRORS / f"torchelastic-{rank}.json"),
            **{ENV_AGENT: self._agents.job, ENV_PARENT: str(os.getpid())},
            **self._times(),
        }

    def _times(self) -> dict[str, str]:
        """Return times for the timeline: when this agent started, or after a restart, when the failure occurred."""
        if why := self.rendezvous.why:
            return {timeline.ENV_AGENT_BEGAN: "", timeline.ENV_ALLOCATED: str(why.time)}
        return {timeline.ENV_AGENT_BEGAN: str(self._began or "")}

    def _timeout(self) -> timedelta:
        left = left_of_job(os.environ, time.time())
        return self._spec.comm.timeout.start_up(self._spec.nodes, left)
