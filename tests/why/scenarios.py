"""Run folders of failed runs, written by hpcinit's code, and what hpcinit decides about each of them.

It runs as a program in a new interpreter: `build FOLDER SEED` or `decide FOLDER SEED`. With a SEED other than 0 every
sentence in hpcinit's functions is first replaced by random text (tests/why/rewriting.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

HERE = "127.0.0.1"
JOB = "5.0.0"
# As torch with gloo writes it.
CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:28071."
SRUN = (  # of Slurm 22.05: rank 3 failed, and srun ended the others
    "srun: error: n2: task 3: Exited with exit code 1\n"
    "srun: launch/slurm: _step_signal: Terminating StepId=5.0\n"
    "srun: error: n1: tasks 0-1: Terminated\n"
)
LOST = "srun: error: n1: tasks 0-1: Exited with exit code 1\nsrun: error: Node failure on n2\n"
STACK = """main thread 0x00007f6b1f0a8740
Thread 0x00007f6b1f0a8740 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3108 in all_reduce
  File "/home/me/train.py", line 57 in step
"""


def begin(run: Path, log: str = "") -> None:
    """Write the files of a submission and its batch script to `run`."""
    for name in ("errors", "logs"):
        (run / name).mkdir(parents=True)
    (run / "logs/job.log").write_text(log)
    submission = {"engine": "slurm", "cluster": "x", "job_id": "5", "submitted": time.time()}
    (run / "submission.json").write_text(json.dumps(submission))
    (run / "exit.json").write_text('{"job": "5", "restart": 0}')
    os.environ["HPCINIT_RUN"] = str(run)


def world(rank: int, size: int = 4) -> Any:
    """Return rank `rank` of `size`, two on each node."""
    from hpcinit.world import World

    hosts = tuple(f"n{number + 1}" for number in range(size // 2))
    return World("slurm", rank, size, rank % 2, 2, rank // 2, hosts, HERE, free_ports(4), JOB)


def free_ports(count: int) -> tuple[int, ...]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((HERE, 0))) for _ in range(count)]
        return tuple(server.getsockname()[1] for server in servers)


def fails(rank: int, error: BaseException) -> None:
    """Write the error record of a rank, as the end of its program does."""
    from hpcinit.runtime import program

    program.record(error, world(rank))


@contextlib.contextmanager
def rendezvous(ranks: range) -> Iterator[list[Any]]:
    """Yield the connections of `ranks`, of a world of 4, to each other; rank 0 listens."""
    from hpcinit.rendezvous import protocol
    from hpcinit.rendezvous.rendezvous_client import RendezvousClient
    from hpcinit.rendezvous.server import RendezvousServer

    first = world(0)
    given: dict[str, Any] = {"key": "k", "job": "j", "made_of": {"torch": "2.13.0"}}
    members: list[Any] = []
    for rank in ranks:
        one = replace(first, rank=rank, local_rank=rank % 2, node_rank=rank // 2)
        with mock.patch.object(protocol, "identity", lambda one=one: {"host": one.host, "pid": 70 + one.rank}):
            if rank == 0:
                members.append(RendezvousServer(one, address=HERE, **given))
            else:
                members.append(RendezvousClient(one, resolve=lambda: [HERE], deadline=time.monotonic() + 5, **given))
    try:
        yield members
    finally:
        for member in reversed(members):
            member.close()


def waits(member: Any, within_s: float = 5.0) -> BaseException:
    """Return the error with which this rank's start-up ends."""
    from hpcinit.base.errors import BringUpError

    try:
        member.wait_for_all(time.monotonic() + within_s, 60)
    except BringUpError as error:
        return error
    raise AssertionError("the start-up did not fail")


def exception(run: Path) -> None:
    begin(run, SRUN)
    fails(0, RuntimeError(CLOSED))
    fails(3, ValueError("bad sample 17"))
    fails(1, RuntimeError(CLOSED))


def missing_rank(run: Path) -> None:
    """Rank 3 never starts; the others time out."""
    begin(run)
    with rendezvous(range(3)) as (first, second, third):
        for rank, member, within_s in ((0, first, 0.2), (1, second, 3.0), (2, third, 3.0)):
            fails(rank, waits(member, within_s))


def missing_node(run: Path) -> None:
    """No rank of n2 starts, and rank 1 times out first: it queries rank 0 for the missing ranks."""
    begin(run)
    with rendezvous(range(2)) as (first, second):
        for rank, member, within_s in ((1, second, 0.2), (0, first, 0.2)):
            fails(rank, waits(member, within_s))


def peer_lost(run: Path) -> None:
    """Rank 2 fails during start-up. The records of the others, which it informed, are older than its own."""
    begin(run)
    with rendezvous(range(3)) as (first, second, third):
        third.fail("ModuleNotFoundError: No module named 'flash_attn'")
        for rank, member in ((0, first), (1, second)):
            fails(rank, waits(member))
    fails(2, ModuleNotFoundError("No module named 'flash_attn'"))


def only_peers_of_a_lost_rank(run: Path) -> None:
    """Rank 2 exited without a record."""
    begin(run)
    with rendezvous(range(3)) as (first, second, third):
        third.fail("killed")
        for rank, member in ((0, first), (1, second)):
            fails(rank, waits(member))


def ports_taken(run: Path) -> None:
    """Other programs listen on all candidate ports of rank 0."""
    from hpcinit.base.errors import BringUpError
    from hpcinit.rendezvous import server as server_module
    from hpcinit.rendezvous.rendezvous_client import JoinRequest

    begin(run)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((HERE, 0))) for _ in range(3)]
        ports = tuple(server.getsockname()[1] for server in servers)
        try:
            with mock.patch.object(server_module, "look_for_another_rank_0"):  # it would wait for each of these servers
                server_module.listen(HERE, ports, JoinRequest(0, "k", "j", {}))
        except BringUpError as error:
            fails(0, error)


def no_memory_for_a_command(run: Path) -> None:
    """The kernel refuses to start the user's command, and hpcinit's message contains the kernel's message."""
    from hpcinit.base.errors import RequestError
    from hpcinit.records.spec import Program
    from hpcinit.runtime import program

    begin(run)
    with mock.patch.object(os, "execvp", side_effect=OSError(12, "Cannot allocate memory")):
        try:
            program._command(Program("command", "simulate"))
        except RequestError as error:
            fails(1, error)


def hang(run: Path, heartbeats: dict[str, Any], action: str = "report") -> None:
    """The ranks 0 and 1 wait in a collective; rank 0 reports the hang."""
    from hpcinit.records.heartbeats import NodeHeartbeats, RankHeartbeat
    from hpcinit.runtime.lifecycle import heartbeat

    begin(run)
    for folder in ("heartbeats", "hang"):
        (run / folder / JOB).mkdir(parents=True)
    for rank in (0, 1):
        (run / f"hang/{JOB}/rank-{rank}.txt").write_text(STACK)
    for host, (age_s, found) in heartbeats.items():
        node = NodeHeartbeats(host, time.time() - age_s, tuple(RankHeartbeat(*one) for one in found))
        (run / f"heartbeats/{JOB}/{host}.json").write_text(node.to_json())
    one = heartbeat.Heartbeat.__new__(heartbeat.Heartbeat)
    one.__dict__ |= {"_world": world(0), "_asked": SimpleNamespace(after_s=2, action=action), "_period": 0.5}
    one.__dict__ |= {
        "_heartbeats": run / "heartbeats" / JOB,
        "_hang": run / "hang" / JOB,
        "_reported": False,
        "_decides": False,
    }
    with mock.patch.object(os, "_exit", lambda status: None):
        one._report(90.0)


HEALTHY_NODE = (0.0, [(0, 70, 41, 90.0), (1, 71, 41, 90.0)])


def stuck_rank(run: Path) -> None:
    hang(run, {"n1": HEALTHY_NODE, "n2": (0.0, [(2, 72, 41, 90.0, "stopped"), (3, 73, 41, 90.0, "mute")])})


def stuck_rank_of_which_only_a_record_is_left(run: Path) -> None:
    hang(run, {"n1": HEALTHY_NODE, "n2": (0.0, [(2, 72, 41, 90.0, "gone"), (3, 73, 41, 90.0, "mute")])}, "end")
    shutil.rmtree(run / "hang")


def silent_node(run: Path) -> None:
    hang(run, {"n1": HEALTHY_NODE, "n2": (500.0, [(2, 72, 41, 90.0), (3, 73, 41, 90.0)])}, "end")


def lost_node(run: Path) -> None:
    begin(run, LOST)
    fails(0, RuntimeError(CLOSED))


BUILT: dict[str, Callable[[Path], None]] = {
    one.__name__: one
    for one in (
        exception,
        missing_rank,
        missing_node,
        peer_lost,
        only_peers_of_a_lost_rank,
        ports_taken,
        no_memory_for_a_command,
        stuck_rank,
        stuck_rank_of_which_only_a_record_is_left,
        silent_node,
        lost_node,
    )
}


def of_folder(run: Path) -> dict[str, Any]:
    """Return what hpcinit decides about the run, and its advice."""
    from hpcinit.config.schema import Config
    from hpcinit.engine import SLURM
    from hpcinit.observe.state import State
    from hpcinit.records import node_records
    from hpcinit.submit import excluded_nodes as submission
    from hpcinit.why import diagnosis, gather_evidence, why_command
    from hpcinit.why import node_exclusion as observed

    failed = State("FAILED", "5", SLURM, away=True)  # so that Slurm is not queried
    found = gather_evidence.gather(run, failed)
    verdict = diagnosis.diagnose(found)
    # Requeued after Slurm reported a failed node of the previous attempt.
    again = why_command._again(run, failed._replace(name="PENDING"), replace(found, state="NODE_FAIL"))
    faults = list(observed._failures(run, {"engine": "slurm"}, found))
    table = node_records.node_states(faults, time.time(), 24)
    config = Config()
    config.cluster.name, config.excluded_nodes.limit = "x", 1
    return {
        "kind": verdict.kind,
        "rank": verdict.rank,
        "host": verdict.host,
        "do": verdict.do,
        "waits_for_a_cause": diagnosis.has_only_secondary_errors(found),
        "secondary": [re.sub(r"[^0-9].*", "", line) for line in verdict.secondary],  # how many ranks
        "when_requeued": again.kind,
        "nothing_to_do_when_requeued": again.do == why_command.RESTARTS_ALONE,
        "counted": sorted((one.host, one.kind) for one in faults),
        "excluded": submission.decide(config, table).hosts,
        "replaced": replaced(run),
        "at_fault": [
            (one.record.kind, one.record.rank_at_fault, one.record.host_at_fault)
            for one in found.found
            if one.record.kind
        ],
    }


def replaced(run: Path) -> str:
    """Return the node that a job with spare nodes replaces after a hang."""
    return "".join(json.loads(path.read_text())["host"] for path in run.glob("hang/*/report.json"))


def refused_submissions(_: Path) -> dict[str, Any]:
    """Return whether 'nothing was submitted' is still in a message about several jobs, where it would be wrong."""
    from hpcinit.base.errors import SubmitError
    from hpcinit.checks import validate
    from hpcinit.config.request import Request
    from hpcinit.config.schema import Config
    from hpcinit.submit import restart, submit_command

    refused = validate.refused("sbatch: error: Batch job submission failed: Invalid qos specification", "")
    outcome = str(refused).splitlines()[-1]
    config = Config()
    config.chain = 2
    requests = [Request(config, {}, f"seed={seed}", ()) for seed in (1, 2)]
    with mock.patch.object(submit_command.submission, "submit", side_effect=refused):
        try:
            submit_command._all(requests, [], [], {}, False)
            of_a_sweep = "no error"
        except SubmitError as error:
            of_a_sweep = str(error)
    of_a_chain = restart.hand_over(mock.Mock(side_effect=[("5", ["sbatch"]), refused]), config).missing
    return {"sweep": outcome in of_a_sweep, "chain": outcome in of_a_chain}


def main(what: str, folder: Path, seed: int) -> None:
    if seed:
        from tests.why import rewriting

        rewriting.install(seed)
    if what == "build":
        for name, make in BUILT.items():
            make(folder / name)
        return
    found = {name: of_folder(folder / name) for name in BUILT}
    print(json.dumps({**found, "refused_submissions": refused_submissions(folder)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
