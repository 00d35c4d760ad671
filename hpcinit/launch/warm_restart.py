"""Restarts inside the job with launch=fork and restart.warm: each fork server ends its ranks and forks new ranks.

The server of the first node decides when all ranks end and restart (decider.py). The other servers report how their
ranks ended, and follow its orders. A server forks new ranks only when the first server orders this. The first server
gives this order when no rank is running on any node, and never after a stop signal. A server on a spare node has no
ranks until the spare node replaces a lost node.

If the first server does not respond any more, the other servers and their ranks exit as without restart.warm.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hpcinit.base import background_writer, processes, signals
from hpcinit.base.console import say
from hpcinit.base.supervisor import Child
from hpcinit.base.text import rank_names
from hpcinit.launch.decider import FINAL, Decider, refusal
from hpcinit.launch.server_link import PATIENT_S, Link, connect_servers
from hpcinit.launch.signal_monitor import FORWARDED
from hpcinit.node import nvidia_smi
from hpcinit.records import elastic_restarts, job_log, requeues, run_folder, scratch, timeline
from hpcinit.records.elastic_restarts import Restart
from hpcinit.records.spec import Spec
from hpcinit.runtime.process_state import state
from hpcinit.runtime.shared_progress import slots
from hpcinit.world import launchers
from hpcinit.world.launchers.slurm_step import ForkNode

FIRST = 0  # the number of the server that decides
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
MEMORY_S = 50.0  # how long the driver may take to free the memory of killed processes
# How long a server may take to end its ranks: MEMORY_S, and time for ranks and orphans that the kernel ends slowly.
LIMIT_S = MEMORY_S + 25.0
ORPHANS_S = 10.0  # how long to wait until killed orphans have ended
RANK_PARTS = {
    "rendezvous": "up",
    "load": "loaded",
    "first_step": "stepped",
}  # the phases of a restart that ranks report, and the values in a slot that show their end


class Ranks(Protocol):
    """The part of a ForkSupervisor that WarmRestarts uses. Each restart creates a new ForkSupervisor."""

    children: dict[int, Child]
    stop_received: bool
    ended_by_order: bool

    def end_ranks(self) -> None: ...
    def running(self) -> list[Child]: ...
    def signal(self, number: int) -> None: ...


class WarmRestarts:
    """The warm restarts of one step, on one node.

    The constructor raises BringUpError if another node's fork server does not start.
    """

    def __init__(self, here: ForkNode, spec: Spec, folder: Path) -> None:
        servers = launchers.read(os.environ)
        self.here, self._spec, self._folder, self._job = here, spec, folder, servers.job
        self._number, self._host = here.rank, here.host or os.uname().nodename
        known = len(servers.hosts) == servers.world_size
        self._hosts = servers.hosts if known else [f"node {node}" for node in range(servers.world_size)]
        first = here.rank == FIRST
        lost = self._of_lost if spec.launch.spares else None
        self._decider = Decider(self._hosts, LIMIT_S, self._decide, here.nodes, lost) if first else None
        self._link = Link(connect_servers(spec, servers), self._decider)
        if not spec.launch.spares:  # no spare node could replace a silent node, so wait longer
            self._link.report_silence_after(PATIENT_S)
        self._round = 0
        self._why: Restart | None = None  # the reason for this round
        self._next: Restart | None = None  # the reason in an order to start ranks that are not forked yet
        self._ends_round = -1  # the last round whose ranks must end
        self._over: Mapping[str, Any] | None = None  # the last order: there are no more restarts
        self._stopped = False  # stopped by a signal while no rank was running
        self._cut_off = False  # whether the first server is unreachable; other nodes may continue without this node
        self._missed: list[int] = []  # signals for ranks that arrived while none was running
        self._slots = slots(spec.ranks_per_node)
        processes.adopt_orphans()
        self._helpers = processes.children(os.getpid())  # child processes of this server that are no ranks
        # Only on the first server: the restarts of this step, and when the phases of the last one ended.
        self._before: list[Restart] = []
        self._ended_at = self._forked_at = 0.0
        self._recorded = 0  # the last round whose phases were recorded

    # --- for the new ranks

    def forget(self) -> None:
        """Close this process's copies of the connections. Call this in a forked rank."""
        self._link.close()

    def become_child(self, local_rank: int) -> dict[str, str]:
        """Return additional environment variables for the rank. Call this in the rank after its log is open."""
        state.slot = self._slots[local_rank]
        found = {"TORCHELASTIC_RESTART_COUNT": str(self._round)}
        if self._why is not None:
            say(self._message(self._why))
            found |= {elastic_restarts.ENV_ROUND: str(self._round), timeline.ENV_ALLOCATED: f"{self._why.time:.6f}"}
        return found

    # --- while ranks run

    def wait(self, ranks: Ranks, received: signals.Descriptor, timeout_s: float) -> int | None:
        """Return the next signal, or None after the timeout. Follow the orders that arrive meanwhile."""
        while self._missed:
            ranks.signal(self._missed.pop())
        self._reap_orphans(ranks)
        self._forked_at = self._forked_at or time.time()
        self._record_phases(only_complete=True)
        number = self._link.wait(received, timeout_s)
        self._obey(ranks)
        return number

    def report_failure(self, child: Child, terminated: bool) -> None:
        """Report to the first server how a rank failed.

        terminated: whether the rank got SIGTERM because another rank had failed. If so, report it only if it has
            recorded an error with a different cause.
        """
        step, code = int(self._slots[child.number - self.here.first]["step"]), child.code or 0
        failed = elastic_restarts.of_failure(
            self._folder, self._round_job(), self._round + 1, child.number, self._host, code, step
        )
        if not terminated or (failed.error and not failed.secondary):
            final = code in FINAL and not terminated
            self._link.send({"round": self._round, "failed": failed.to_json(), "final": final})

    def stop(self) -> None:
        """Report to the first server that this step must stop without further restarts."""
        self._link.send({"stop": True})

    # --- when no rank of this node runs

    def next_start(self, ranks: Ranks, status: int) -> int | None:
        """Wait for the next order. Return None if new ranks must be forked, or else the exit status of this server.

        status: the exit status of the ranks, -9 for SIGKILL.
        """
        with closing(signals.Descriptor(FORWARDED)) as received:
            if not self._ends(ranks):
                problem = self._free_node(ranks, received) if status or ranks.ended_by_order else ""
                self._wait_without_ranks(ranks, received, 0.0)  # handle a stop or a lost server before this report
                self._link.send({"round": self._round, "ended": problem})
            elif self._cut_off:
                self._end_orphans(ranks)  # they may write files that new ranks on a spare node use
            while not self._ends(ranks) and self._next is None:
                self._wait_without_ranks(ranks, received, 1.0)
            # Do not exit without a network: srun would never get this server's exit status and would wait forever.
            while self._cut_off and not (self._stopped or ranks.stop_received or self._link.is_first_reachable()):
                self._wait_without_ranks(ranks, received, 1.0)
        self._record_phases(only_complete=False)
        if self._next is None or self._ends(ranks):
            node = self._over["node"] if self._over else -1
            if node not in (-1, self._number):
                return 0  # with 0, srun reports only the node of the rank that failed first
            # srun does not count a lost node as a failure. So this server fails, even if its ranks have succeeded.
            failed = ranks.ended_by_order or (self._over is not None and "gone" in self._over)
            return status or (-signal.SIGTERM if failed else 0)
        self._end_orphans(ranks)  # ranks that succeeded may have left some, too
        if mine := scratch.base(os.environ):  # remove the folders of killed ranks
            scratch.sweep(mine)
        self._round, self._why, self._next = self._round + 1, self._next, None
        self._slots, self._forked_at = slots(self._spec.ranks_per_node), 0.0
        return None

    def _ends(self, ranks: Ranks) -> bool:
        return self._over is not None or self._stopped or ranks.stop_received

    def _wait_without_ranks(self, ranks: Ranks, received: signals.Descriptor, timeout_s: float) -> None:
        """Wait for orders and signals. Report a stop signal to the first server."""
        number = self._link.wait(received, timeout_s)
        if number in STOPPING:
            self._stopped = True
            self.stop()
        elif number is not None and signal.Signals(number).name == f"SIG{self._spec.stop.signal}":
            self._missed.append(number)
        self._obey(ranks)

    def _orphans(self, ranks: Ranks) -> set[int]:
        """Return the processes that ranks started and left running, such as a daemon or an inference server.

        This server has adopted them. Only processes in their own session can outlive their rank.
        """
        own = {child.pid for child in ranks.children.values()}
        return set(processes.children(os.getpid())) - {*self._helpers, *own}

    def _reap_orphans(self, ranks: Ranks) -> None:
        for pid in self._orphans(ranks):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _end_orphans(self, ranks: Ranks) -> set[int]:
        """Kill the processes that the ranks left running, because they may use files, ports or GPU memory.

        Slurm does the same at the end of a step. Wait up to ORPHANS_S seconds until they have ended. Return their ids.
        """
        found, until = set(), time.monotonic() + ORPHANS_S
        while (orphans := self._orphans(ranks)) and time.monotonic() < until:
            for pid in orphans:  # these children are not reaped, so no other process has their ids
                os.kill(pid, signal.SIGKILL)
            self._reap_orphans(ranks)
            found |= orphans
            time.sleep(0.01)
        return found

    def _free_node(self, ranks: Ranks, received: signals.Descriptor) -> str:
        """Kill the processes that the ranks left running, and wait until they use no GPU any more.

        Return why the node can't start ranks, or '' if it can.
        """
        if running := ranks.running():
            return f"{rank_names([child.number for child in running])} is still running after SIGKILL"
        own = {child.pid for child in ranks.children.values()} | self._end_orphans(ranks)
        if stuck := self._orphans(ranks):
            return f"process {min(stuck)}, which a rank started, is still running after SIGKILL"
        until, said = time.monotonic() + MEMORY_S, False
        while (found := nvidia_smi.pids(timeout_s=5.0)) is None or found & own:
            if time.monotonic() > until:
                return f"the ranks still use GPU memory {MEMORY_S:g} s after they ended (see nvidia-smi)"
            if not said:
                say(f"{self._host}: waiting up to {MEMORY_S:g} s until the driver frees the GPU memory of exited ranks")
            said = True
            self._wait_without_ranks(ranks, received, 0.5)
            if self._ends(ranks):
                break
        return ""

    def _obey(self, ranks: Ranks) -> None:
        for order in self._link.receive():
            if self._over is not None:
                continue
            if "end" in order:
                self._ends_round = int(order["end"])
            elif "patience" in order:
                self._link.report_silence_after(PATIENT_S)
            elif "start" in order:
                self._next = elastic_restarts.from_json(order["why"])
                self.here = self._place(order["nodes"])
            else:
                gone, node = "the fork server of the first node is gone", -1
                if "lost" in order and self._spec.launch.spares:
                    # The other ranks may use a spare node by now, and any exit status but 0 would end their step.
                    self._ends_round, self._cut_off = self._round, True
                    gone, node = "", FIRST
                    say(f"{self._host} cannot reach the first node: ending its ranks; a spare node may replace it")
                self._over = order if "over" in order else {"over": gone, "node": node}
                if self._decider is not None and "gone" in order:
                    # Slurm may not notice the loss, if the node's network works again soon.
                    with background_writer.suppressed("the record of a lost node"):
                        requeues.record_unusable(self._folder, order["gone"], os.environ)
                if self._over["over"] and (self._decider is not None or "lost" in order):
                    say(f"no more warm restarts: {self._over['over']}")
        # This order may arrive together with the order to start these ranks, before they are forked.
        if self._ends_round == self._round and not ranks.ended_by_order:
            ranks.end_ranks()

    def _place(self, nodes: list[int]) -> ForkNode:
        """Return the new ForkNode of this node for the next start of the ranks.

        nodes: the numbers of the nodes with ranks, in order.
        """
        hosts = tuple(self._hosts[node] for node in nodes) if self._spec.launch.spares else ()
        at, ranks = (nodes.index(self._number), self._spec.ranks_per_node) if self._number in nodes else (-1, 0)
        return replace(self.here, rank=at, ranks_per_node=ranks, hosts=hosts)

    def _round_job(self) -> str:
        return elastic_restarts.round_folder(self._job, self._round)

    def _message(self, why: Restart) -> str:
        return f"{job_log.NEW_ATTEMPT}warm restart {why.number} of job {self._job.partition('.')[0]}: {why}"

    # --- in the first server

    def _of_lost(self, place: int, host: str) -> Restart:
        """Return the failure to record for a lost node. The failed rank is the node's first rank.

        place: the node's index among the nodes with ranks.
        """
        rank, job = place * self._spec.ranks_per_node, self._round_job()
        return Restart(job, self._round + 1, time.time(), rank, host, elastic_restarts.LOST)

    def _decide(self, cause: Restart) -> str:
        """Record the restart and return '', or return why the ranks must not restart. No rank is running now."""
        assert self._decider is not None
        self._record_phases(only_complete=False)
        self._ended_at, ordered = time.time(), self._decider.end_ordered or time.time()
        phases = {"detect": round(max(ordered - cause.time, 0.0), 3), "end": round(self._ended_at - ordered, 3)}
        furthest = max(int(slot[name]) for slot in self._slots for name in ("step", "saved"))
        restart = replace(cause, furthest=furthest, phases=phases)
        if refused := refusal(self._before, restart, self._spec.launch.without_progress):
            return refused
        self._before.append(restart)
        with background_writer.suppressed("the folder of old error records"):
            elastic_restarts.set_aside(self._folder, cause.job)
        self._record(restart)
        say(self._message(restart))
        return ""

    def _record(self, restart: Restart) -> None:
        with background_writer.suppressed(run_folder.ELASTIC):
            elastic_restarts.record(self._folder, restart)

    def _record_phases(self, only_complete: bool) -> None:
        """Record how long each phase of the last restart took. Do this once per restart.

        only_complete: do nothing if rank 0 has not made its first step after the restart.
        """
        if not self._before or self._before[-1].number != self._round or self._recorded == self._round:
            return
        slot, at, phases = self._slots[0], self._ended_at, dict(self._before[-1].phases)
        if only_complete and not slot["stepped"]:
            return
        self._recorded = self._round
        ends = {"fork": self._forked_at, **{part: slot[name] for part, name in RANK_PARTS.items()}}
        for part, end in ends.items():
            if end:
                phases[part], at = round(max(end - at, 0.0), 3), end
        self._before[-1] = replace(self._before[-1], phases=phases)
        self._record(self._before[-1])
