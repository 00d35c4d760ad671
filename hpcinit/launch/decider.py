"""Decides when all ranks end and restart, with restart.warm. Only the fork server of the first node uses this module.

After a failure, all servers end their ranks. When every server has reported that none of its ranks is running, all
servers fork new ranks. There are no more restarts in this step

- after a stop signal,
- if a server does not report in time,
- if a server is lost before its ranks succeeded, and no spare node can replace it,
- if the failure must not lead to a restart (see refusal() and FINAL).

Each server then acts as without restart.warm, and Slurm ends the step when the first server exits.

A spare node has a server without ranks. If the job has spare nodes, a server that loses its connection to the first
server ends its ranks. So no old rank keeps running on a node that only lost its network.

Messages:

    from a server: failed, ended, stop, lost (its connection has ended)
    to all servers: end (end your ranks), start (fork new ranks, on these nodes), over (there are no more restarts),
        patience (no spare node is left: wait longer before a silent server counts as lost)

A message about an earlier start of the ranks is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcinit.records import elastic_restarts
from hpcinit.records.elastic_restarts import Restart

# Exit statuses after which the ranks do not restart: a wrong request, and a program that stopped early on purpose.
FINAL = (2, 143)
SAME_FAILURES = 3


def refusal(before: Sequence[Restart], failed: Restart, limit: int | None) -> str:
    """Return why the ranks must not restart after the failure `failed`, or '' if they may.

    There are two reasons:
    - A rank failed SAME_FAILURES times in a row with the same error after the same step.
    - `limit` restarts in a row made no progress. If no rank reports steps, no restart makes progress.

    before: the earlier restarts of this step, in order.
    limit: restart.without_progress, or None.
    """
    found = [*before, failed]
    last = {(one.rank, one.how, one.error, one.step) for one in found[-SAME_FAILURES:]}
    if failed.step >= 0 and len(found) >= SAME_FAILURES and len(last) == 1:
        return f"rank {failed.rank} failed {SAME_FAILURES} times with the same error after step {failed.step}"
    furthest, idle = -1, -1
    for one in found:
        furthest, idle = (one.furthest, 0) if one.furthest > furthest else (furthest, idle + 1)
    if limit is not None and idle >= limit:
        beyond = f"beyond step {furthest}" if furthest >= 0 else "that the ranks reported (run.progress or run.save)"
        return f"{idle} restarts in a row made no progress {beyond} (restart.without_progress)"
    return ""


class Decider:
    """Decides for all nodes when ranks end and restart. It uses no sockets and starts no processes.

    Call the object with each message from a server. The call yields the orders for all servers.

    hosts: the names of the nodes.
    limit_s: how many seconds the servers have to end their ranks after a failure.
    decide: called with the cause of a failure, when no rank is running. It records the restart and returns '', or it
        returns why the ranks must not restart.
    nodes: how many nodes have ranks. The others are spare nodes.
    lost: returns the failure to record for a lost node. Its arguments are the node's index among the nodes with ranks,
        and its host. None if the job requested no spare nodes.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        limit_s: float,
        decide: Callable[[Restart], str],
        nodes: int | None = None,
        lost: Callable[[int, str], Restart] | None = None,
    ) -> None:
        self._hosts, self._limit_s, self._decide, self._lost = hosts, limit_s, decide, lost
        self.round = 0
        self._servers = set(range(len(hosts)))  # the servers that are not lost
        self._nodes = list(range(len(hosts) if nodes is None else nodes))  # the nodes with ranks, by place
        self.end_ordered: float | None = None  # time.time() of the order that ends the ranks
        self._over = False
        self._deadline: float | None = None  # until when all ranks must have ended, by time.monotonic()
        self._ended: set[int] = set()
        self._failures: list[tuple[Restart, int, bool]] = []  # failure, its node, whether its status is in FINAL

    def __call__(self, node: int, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._over:
            return
        if "stop" in message:
            yield self._end_for_good("")
        elif "lost" in message:
            yield from self._lose(node)
        elif message.get("round") == self.round and "failed" in message:
            yield from self._fail(elastic_restarts.from_json(message["failed"]), node, bool(message.get("final")))
        elif message.get("round") == self.round and "ended" in message:
            self._ended.add(node)
            if message["ended"]:
                cause = self._cause()[1] if self._failures else -1
                yield self._end_for_good(f"{self._hosts[node]}: {message['ended']}", cause)
            elif self._ended == self._servers:
                yield self._next()
        elif self._deadline is not None and time.monotonic() > self._deadline:
            silent = [self._hosts[node] for node in sorted(self._servers - self._ended)]
            late = f"did not report within {self._limit_s:g} s that its ranks have ended"
            yield self._end_for_good(f"{', '.join(silent)} {late}")

    def _fail(self, failure: Restart, node: int, final: bool) -> Iterator[dict[str, Any]]:
        """Record a failure. After the first one, order all servers to end their ranks."""
        self._failures.append((failure, node, final))
        if self._deadline is None:
            self._deadline, self.end_ordered = time.monotonic() + self._limit_s, time.time()
            yield {"end": self.round}

    def _lose(self, node: int) -> Iterator[dict[str, Any]]:
        """Replace a lost node with a spare node. If there is none, order all servers to stop restarting."""
        # If the node's ranks have succeeded, the other ranks may still succeed, for example while rank 0 saves.
        is_done = node in self._ended and not self._failures
        self._servers.discard(node)
        self._ended.discard(node)
        if node in self._nodes and not is_done:
            failure = self._replace(node)
            if failure is None:
                if self._lost is not None:
                    # With --no-kill, Slurm does not end the step, and a rank may wait forever for one on a node without
                    # a network.
                    yield {"end": self.round}
                yield self._give_up(node)
                return
            yield from self._fail(failure, -1, False)
        if self._servers == set(self._nodes):
            yield {"patience": True}
        if self._ended == self._servers:
            yield self._next()

    def _replace(self, node: int) -> Restart | None:
        """Make a spare node replace a lost node. Return the failure to record, or None if no spare node is left."""
        spare = min(self._servers - set(self._nodes), default=None)
        if spare is None or self._lost is None:
            return None
        place = self._nodes.index(node)
        self._nodes[place] = spare
        return self._lost(place, self._hosts[node])

    def _give_up(self, node: int) -> dict[str, Any]:
        """Return the order that ends all restarts, because no spare node can replace `node`."""
        gone = {"gone": self._hosts[node]} if self._lost is not None else {}
        return self._end_for_good(f"the fork server on {self._hosts[node]} is gone") | gone

    def _next(self) -> dict[str, Any]:
        """Return the next order. Call this when no rank is running any more."""
        if not self._failures:
            return self._end_for_good("", 0)
        for lost in [one for one in self._nodes if one not in self._servers]:  # lost after their ranks had succeeded
            if self._replace(lost) is None:
                return self._give_up(lost)
        cause, node = self._cause()
        if any(final for _, _, final in self._failures):
            return self._end_for_good("ranks that exit with status 2 or 143 are not restarted", node)
        if refused := self._decide(cause):
            return self._end_for_good(refused, node)
        self.round += 1
        self._ended, self._failures, self._deadline = set(), [], None
        return {"start": self.round, "why": cause.to_json(), "nodes": [*self._nodes]}

    def _cause(self) -> tuple[Restart, int]:
        """Return the failure that caused the others, and its node (-1 for a lost node)."""
        first = elastic_restarts.cause([one for one, _, _ in self._failures])
        return first, next(node for one, node, _ in self._failures if one is first)

    def _end_for_good(self, why: str, node: int = -1) -> dict[str, Any]:
        """Return the last order: there are no more restarts.

        why: the reason, or '' if there is nothing to report.
        node: the node of the first failure, or -1 if it is unknown.
        """
        self._over = True
        return {"over": why, "node": node}
