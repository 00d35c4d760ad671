"""What the fork server of the first node decides for all of them with restart.warm. No sockets, no processes.

The invariant: a set of ranks starts only when every server has reported that no rank of the set before runs. A stop
signal, a server that is gone, or one that does not report in time ends the restarts of this step for good: each server
then acts as without restart.warm, and Slurm ends the step when the first of them exits.

A spare node has a server without ranks, which takes the place of one that is gone. A server that has lost its
connection to the first one ends its ranks, so that no old rank runs on a node that only lost its network.

    from a server: failed, ended, stop, lost (its connection has ended)
    to all servers: end (end your ranks), start (fork new ones, on these nodes), over (no restart any more)

A message about an earlier start of the ranks is ignored: its failure is part of a restart that has happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcinit.records import elastic_restarts
from hpcinit.records.elastic_restarts import Restart

# Exit statuses after which the ranks do not start again: a wrong request, and a program that stopped early on purpose.
FINAL = (2, 143)
SAME_FAILURES = 3


def refusal(before: Sequence[Restart], failed: Restart, limit: int | None) -> str:
    """Return why the ranks do not start again after `failed`, or ''.

    before: the restarts of this step, in order. limit: restart.without_progress. A rank that fails in the same way at
    the same step was started twice for that: it is the program. Steps that no rank reports count as no progress.
    """
    found = [*before, failed]
    last = {(one.rank, one.how, one.error, one.step) for one in found[-SAME_FAILURES:]}
    if failed.step >= 0 and len(found) >= SAME_FAILURES and len(last) == 1:
        return f"rank {failed.rank} has failed {SAME_FAILURES} times in the same way after step {failed.step}"
    furthest, idle = -1, -1
    for one in found:
        furthest, idle = (one.furthest, 0) if one.furthest > furthest else (furthest, idle + 1)
    if limit is not None and idle >= limit:
        beyond = f"beyond step {furthest}" if furthest >= 0 else "that the ranks reported (run.progress or run.save)"
        return f"{idle} restarts in a row made no progress {beyond} (restart.without_progress)"
    return ""


class Decider:
    """The state of all nodes. Call it with each message; it returns the orders for all servers.

    hosts: the nodes' names. limit_s: a server must report the end of its ranks within this time. decide: called when no
    rank runs any more, with the cause; it returns why the ranks do not start again, or '' after it recorded the
    restart. nodes: how many have ranks; the others are spare nodes. lost: returns the failure of the node at a place.
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
        self._servers = set(range(len(hosts)))  # those that are not gone
        self._nodes = list(range(len(hosts) if nodes is None else nodes))  # those of the ranks, by place
        self.end_ordered: float | None = None  # time.time() of the order that ends the ranks
        self._over = False
        self._deadline: float | None = None  # by time.monotonic()
        self._ended: set[int] = set()
        self._failures: list[tuple[Restart, int, bool]] = []  # with the node, and whether its exit status is final

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
            yield self._end_for_good(f"{', '.join(silent)} did not report the end of its ranks in {self._limit_s:g} s")

    def _fail(self, failure: Restart, node: int, final: bool) -> Iterator[dict[str, Any]]:
        """Record a failure. Order the end of the ranks after the first one."""
        self._failures.append((failure, node, final))
        if self._deadline is None:
            self._deadline, self.end_ordered = time.monotonic() + self._limit_s, time.time()
            yield {"end": self.round}

    def _lose(self, node: int) -> Iterator[dict[str, Any]]:
        """Replace a node whose server is gone by a spare node, or end the restarts if there is none."""
        self._servers.discard(node)
        self._ended.discard(node)
        if node in self._nodes:
            spare = min(self._servers - set(self._nodes), default=None)
            if spare is None or self._lost is None:
                yield self._end_for_good(f"the fork server on {self._hosts[node]} is gone")
                return
            place = self._nodes.index(node)
            self._nodes[place] = spare
            yield from self._fail(self._lost(place, self._hosts[node]), -1, False)
        if self._ended == self._servers:
            yield self._next()

    def _next(self) -> dict[str, Any]:
        """Return the order that follows when no rank runs any more."""
        if not self._failures:
            return self._end_for_good("", 0)
        cause, node = self._cause()
        if any(final for _, _, final in self._failures):
            return self._end_for_good("an exit status of 2 or 143 asks for no restart", node)
        if refused := self._decide(cause):
            return self._end_for_good(refused, node)
        self.round += 1
        self._ended, self._failures, self._deadline = set(), [], None
        return {"start": self.round, "why": cause.to_json(), "nodes": self._nodes}

    def _cause(self) -> tuple[Restart, int]:
        """Return the failure that the others follow from, and its node, -1 for a node that is lost."""
        first = elastic_restarts.cause([one for one, _, _ in self._failures])
        return first, next(node for one, node, _ in self._failures if one is first)

    def _end_for_good(self, why: str, node: int = -1) -> dict[str, Any]:
        """Return the last order. why: '' if nothing has to be reported. node: that of the cause, -1 if unknown."""
        self._over = True
        return {"over": why, "node": node}
