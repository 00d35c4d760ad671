"""The elastic agent of a node with launch=torchrun: it starts, supervises and restarts the node's ranks.

torch's SimpleElasticAgent decides when to restart the ranks. The subclass here starts their processes and reports
their failures. Methods with a leading underscore implement torch's interface:
https://docs.pytorch.org/docs/stable/elastic/agent.html#extending-the-agent
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from hpcinit.base import background_writer, signals
from hpcinit.base.console import say
from hpcinit.base.processes import ENV_PARENT
from hpcinit.base.supervisor import Child, Supervisor
from hpcinit.launch import rank_binding
from hpcinit.launch.torchrun.agent_signals import ENDING, Signals
from hpcinit.launch.torchrun.rendezvous_handler import AgentRendezvous
from hpcinit.records import elastic_restarts, job_log, rank_log, run_folder, timeline
from hpcinit.records.elastic_restarts import Restart
from hpcinit.records.spec import Spec
from hpcinit.records.startup_timeout import left_of_job
from hpcinit.runtime import interpreter_exit, startup
from hpcinit.world import World
from hpcinit.world.launchers.torch_variables import ENV_AGENT

# The ranks of a node are children of its agent. Each has its own session and log.


@dataclass(frozen=True)
class Start:
    """How to start a rank.

    env: the rank's environment variables, which replace this process's.
    log: the rank's log file.
    cpus: the CPUs that the rank may use, or None for those of this process.
    """

    env: Mapping[str, str]
    log: Path
    cpus: Set[int] | None = None


class Workers(Supervisor):
    """The ranks of a node, which start together. The keys of `children` are local ranks.

    torch's agent polls which ranks have ended. It always stops all ranks together.
    """

    stuck_s = 3.0  # how long to wait for a rank that is stuck in the kernel (disk, driver)

    def __init__(
        self,
        command: Sequence[str],
        starts: Sequence[Start],
        around: Callable[[Callable[[], Child]], Child],
    ) -> None:
        """Start a rank for each item of `starts`. If one can't be started, stop the others and raise OSError.

        around: a function like Signals.unblocked, which calls its argument and returns the result. Each start uses it.
        """
        super().__init__()
        try:
            for number, start in enumerate(starts):
                around(partial(self._start, number, command, start))
        except BaseException:
            self.stop(0.0)
            raise

    def pids(self) -> dict[int, int]:
        return {number: child.pid for number, child in self.children.items()}

    def _start(self, number: int, command: Sequence[str], start: Start) -> Child:
        before = os.sched_getaffinity(0)
        with rank_log.opened(start.log) as log:
            try:
                if start.cpus:
                    os.sched_setaffinity(0, start.cpus)  # for this thread and the processes that it starts
                return self.start(number, command, start.env, output=log)
            finally:
                if start.cpus:
                    os.sched_setaffinity(0, before)


GRACE_S = 3.0  # time from SIGTERM to SIGKILL for ranks that cannot continue without the failed rank
SAVE_S = 30.0  # the same if the job must end, because ranks may be saving: Slurm's default KillWait
WRONG_REQUEST = 2  # exit status after a wrong request, with which the rank would also fail after a restart


class Agent(SimpleElasticAgent):
    """The elastic agent of one node.

    start: a function that starts the node's ranks.
    report: prints the failures of this node and returns them, the cause first. Its arguments are the exit statuses of
        the failed local ranks (-9 for SIGKILL), and the local ranks that succeeded.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rendezvous: AgentRendezvous,
        agent_signals: Signals,
        start: Callable[[], Workers],
        report: Callable[[dict[int, int], Sequence[int]], Sequence[Restart]],
    ) -> None:
        super().__init__(spec)
        self._agent_rendezvous, self._signals, self._start, self._report = rendezvous, agent_signals, start, report
        self._workers: Workers | None = None
        self._stop_received = self._terminated = False
        self.status = 0  # exit status of the rank that failed first in the last round

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._workers, self.status = self._start(), 0
        self._signals.collect()
        return self._workers.pids()

    def _stop_workers(self, worker_group: WorkerGroup, *_: object, **__: object) -> None:
        self._shutdown()

    def _shutdown(self, *_: object, **__: object) -> None:
        self._signals.stop_collecting()
        if self._workers is not None:
            self._workers.stop(SAVE_S if self._terminated else GRACE_S, terminated=self._terminated)
            self._workers = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the ranks. torch calls this every `monitor_interval` seconds."""
        assert self._workers is not None  # torch starts them before it monitors them
        self._forward_signals(self._workers)
        ended = self._workers.ended()
        if failures := {rank: status for rank, status in ended.items() if status != 0}:
            return self._handle_failures(
                worker_group, failures, [rank for rank, status in ended.items() if status == 0]
            )
        if len(ended) == worker_group.spec.local_world_size and self._agent_rendezvous.all_done():
            if (
                self._agent_rendezvous.is_over()
            ):  # a rank of another node failed, perhaps because these ranks ended early
                self._report({}, list(ended))
            done = {worker.global_rank: None for worker in worker_group.workers}
            return RunResult(WorkerState.SUCCEEDED, return_values=done)
        return RunResult(WorkerState.HEALTHY)

    def _handle_failures(
        self, worker_group: WorkerGroup, failures: dict[int, int], succeeded: Sequence[int]
    ) -> RunResult:
        """Stop the remaining ranks and report the failure. Request a restart if the limit allows one."""
        self._shutdown()
        first = self._report(failures, succeeded)[0]
        self.status = failures[first.rank % worker_group.spec.local_world_size]
        again = worker_group.spec.max_restarts - self._agent_rendezvous.round
        if self._stop_received or self.status == WRONG_REQUEST:
            again = 0
        # torch counts only the restarts that this agent requested, but the limit applies to those of all agents.
        self._remaining_restarts = max(0, again)
        if again > 0:
            self._agent_rendezvous.request_restart(first)
        else:
            self._agent_rendezvous.end_run()
        return RunResult(WorkerState.FAILED)

    def _exit_barrier(self) -> None:
        """Leave the store, because all ranks have succeeded.

        torch's own barrier would not notice a restart that another agent requests.
        """
        self._agent_rendezvous.leave()

    def _forward_signals(self, ranks: Workers) -> None:
        for number, forward in self._signals.take():
            self._stop_received |= number in ENDING
            self._terminated |= number == signal.SIGTERM
            if forward:
                ranks.signal(number)


# The agent joins the other agents, starts this node's ranks, and reports their failures.


class Node:
    """Starts the ranks of one node for its agent, and reports their failures."""

    def __init__(self, spec: Spec, path: Path, agents: World, agent_signals: Signals) -> None:
        self._spec, self._path, self._folder = spec, path, path.parent
        self._agents, self._signals = agents, agent_signals
        allowed = os.sched_getaffinity(0)
        self._cpus = rank_binding.cpus(spec.launch, spec.ranks_per_node, allowed, os.environ)
        self._began = startup.startup_began()
        self.rendezvous = AgentRendezvous(agents, spec, self._timeout, self._record_restart)

    def start(self) -> Workers:
        """Start the ranks of this node. After a restart, write the reason for it to the log of each rank."""
        starts = [self._start_of(local_rank) for local_rank in range(self._spec.ranks_per_node)]
        if why := self.rendezvous.why:
            for start in starts:
                with (
                    background_writer.suppressed("the restart's line in the log of a rank"),
                    start.log.open("a") as log,
                ):
                    print(f"hpcinit: {self._restart_message(why)}", file=log)
        command = [sys.executable, "-u", "-m", "hpcinit.run", str(self._path)]
        return Workers(command, starts, self._signals.unblocked)

    def report(self, failures: Mapping[int, int], succeeded: Sequence[int] = ()) -> Sequence[Restart]:
        """Print the failures, and return them with the cause first. srun reports the exit of this agent only later.

        failures: the exit statuses of the failed ranks, by local rank.
        succeeded: local ranks that ended with status 0 before.
        """
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
        """Return the failure of a rank, including the error that the rank recorded in this round."""
        host, step = self._agents.host or os.uname().nodename, elastic_restarts.furthest(self._folder)
        number = self.rendezvous.round + 1
        return elastic_restarts.of_failure(
            self._folder, self._job(), number, self._rank(local_rank), host, status, step
        )

    def _record_restart(self, why: Restart) -> None:
        """Record the restart. The first agent calls this when no rank of the previous round is running any more."""
        with background_writer.suppressed("the folder of old error records"):
            elastic_restarts.set_aside(self._folder, why.job)
        with background_writer.suppressed(run_folder.ELASTIC):
            elastic_restarts.record(self._folder, why)
        say(self._restart_message(why))

    def _restart_message(self, why: Restart) -> str:
        number, most, job = self.rendezvous.round, self._spec.launch.max_restarts, self._agents.job.partition(".")[0]
        where = os.environ.get("SLURM_STEP_NODELIST", "")
        return f"{job_log.NEW_ATTEMPT}elastic restart {number} of at most {most} of job {job} starts on {where}: {why}"

    def _job(self) -> str:
        """Return the job id with the number of the current round, which marks the records of this round."""
        return elastic_restarts.round_folder(self._agents.job, self.rendezvous.round)

    def _rank(self, local_rank: int) -> int:
        return self._agents.rank * self._spec.ranks_per_node + local_rank

    def _start_of(self, local_rank: int) -> Start:
        rank, log = self._rank(local_rank), run_folder.RANK_LOG.format(rank=self._rank(local_rank))
        env = {**os.environ, **self._environment(local_rank, rank)}
        env |= rank_binding.devices(self._spec.launch, local_rank, os.environ)
        return Start(env, self._folder / log, None if self._cpus is None else self._cpus[local_rank])

    def _environment(self, local_rank: int, rank: int) -> dict[str, str]:
        """Return torchrun's variables: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables

        The error file for programs that use torch's @record is in the folder of hpcinit's error records.
        """
        nodes, here = self._spec.nodes, self._spec.ranks_per_node
        return {
            **{"RANK": str(rank), "WORLD_SIZE": str(nodes * here)},
            **{"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(here)},
            **{"GROUP_RANK": str(self._agents.rank), "GROUP_WORLD_SIZE": str(nodes)},
            **{"ROLE_NAME": "default", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(nodes * here)},
            **{"MASTER_ADDR": self._agents.master_addr, "MASTER_PORT": str(self._agents.master_ports[0])},
            "TORCHELASTIC_RUN_ID": self._agents.job,
            "TORCHELASTIC_RESTART_COUNT": str(self.rendezvous.round),
            "TORCHELASTIC_MAX_RESTARTS": str(self._spec.launch.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(self._folder / run_folder.ERRORS / f"torchelastic-{rank}.json"),
            **{ENV_AGENT: self._agents.job, ENV_PARENT: str(os.getpid())},
            **self._timeline_times(),
        }

    def _timeline_times(self) -> dict[str, str]:
        """Return variables with the start time of the ranks for the timeline.

        At the first start, this is the start time of this agent. At a restart, it is the time of the failure.
        """
        if why := self.rendezvous.why:
            return {timeline.ENV_AGENT_BEGAN: "", timeline.ENV_ALLOCATED: str(why.time)}
        return {timeline.ENV_AGENT_BEGAN: str(self._began or "")}

    def _timeout(self) -> timedelta:
        left = left_of_job(os.environ, time.time())
        return self._spec.comm.timeout.start_up(self._spec.nodes, left)


def run(spec: Spec, path: Path, agents: World, agent_signals: Signals) -> int:
    """Run the agent until the ranks of all nodes have ended. Return 0, or the exit status of the failed rank.

    If a signal ended that rank, end this process by the same signal. Raise BringUpError if agents are missing.

    path: the file of the spec.
    agents: the World of the agents, in which each agent is a rank.
    """
    node = Node(spec, path, agents, agent_signals)
    worker_spec = WorkerSpec(
        role="default",
        local_world_size=spec.ranks_per_node,
        entrypoint=sys.executable,
        rdzv_handler=node.rendezvous,
        max_restarts=spec.launch.max_restarts,
        monitor_interval=0.1 + spec.nodes / 1000,  # in seconds; each time, all agents query the first agent's store
    )
    # The number of ranks is the same on all nodes, so torch need not exchange it between the agents.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    agent = Agent(worker_spec, node.rendezvous, agent_signals, node.start, node.report)
    failed = agent.run().is_failed()
    if failed and agent.status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # this process must not overwrite the rank's core file
        signals.end_by(-agent.status)
    interpreter_exit.end(agent.status if failed else 0)
    return agent.status if failed else 0
