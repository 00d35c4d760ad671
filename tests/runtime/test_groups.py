"""Side groups: a job's rank 0 with a process outside the job, and the errors when a process is missing."""

from __future__ import annotations

import os
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from hpcinit.base.errors import HpcinitError
from hpcinit.runtime.side_groups import side_group
from tests.runtime.spawned import DEEPSPEED, Rank, free_port, ranks

TRAINER = DEEPSPEED + textwrap.dedent("""
    import os, torch, torch.distributed as dist, hpcinit
    with hpcinit.session(deepspeed=True) as run:
        model = torch.nn.Linear(4, 1)
        config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}
        optimizer = torch.optim.AdamW(model.parameters())  # torch's own: DeepSpeed's would be compiled first
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        def step():
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
            value = torch.ones(1)
            dist.all_reduce(value)
            return value.item()
        before = step()
        if run.rank == 0:
            group = hpcinit.side_group(
                "weights", rank=0, world_size=2, address="127.0.0.1", port=int(os.environ["SIDE"]), backend="gloo"
            )
            dist.broadcast(model.weight.data, src=0, group=group)
            print("sent", round(model.weight.sum().item(), 4))
            during = step()
            dist.barrier(group=group)
            dist.destroy_process_group(group)
        else:
            during = step()
        print(before, during, step())
""")
ENGINE = """
    import os, torch, torch.distributed as dist, hpcinit
    group = hpcinit.side_group(
        "weights", rank=1, world_size=2, address="127.0.0.1", port=int(os.environ["SIDE"]), backend="gloo"
    )
    weight = torch.zeros(1, 4)
    dist.broadcast(weight, src=0, group=group)
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    print("got", round(weight.sum().item(), 4))
"""


def test_weights_reach_a_process_outside_the_job(tmp_path: Path) -> None:
    """With DeepSpeed, rank 0 sends weights to a process without another group, and the job's steps continue."""
    side = {"SIDE": str(free_port())}
    outside = Rank(ENGINE, tmp_path / "outside.log", side)
    try:
        with ranks(TRAINER, 2, tmp_path, **side) as started:
            ended = [rank.end() for rank in [*started, outside]]
    finally:
        outside.process.kill()
        outside.process.wait()
    assert [status for status, _ in ended] == [0, 0, 0], ended
    last = [log.splitlines() for _, log in ended]
    assert last[0][-1] == last[1][-1] == "2.0 2.0 2.0"
    assert last[2][-1] == last[0][-2].replace("sent", "got") and last[2][-1] != "got 0.0"


def _join(
    rank: int, port: int, world_size: int = 3, *, seconds: float = 2.0, backend: str = "gloo", peers: str = "hpcinit"
) -> object:
    """Return the group, or the exception."""
    patience = timedelta(seconds=seconds)
    try:
        return side_group(
            "s",
            rank=rank,
            world_size=world_size,
            address="127.0.0.1",
            port=port,
            backend=backend,
            timeout=patience,
            peers=peers,
        )
    except HpcinitError as error:
        return str(error)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Run `elsewhere(rank, ...)` in another thread instead of a process: none gets as far as torch's group.

    The list contains the return values after they have ended.
    """
    monkeypatch.setattr(os, "getpid", threading.get_ident)
    threads: list[threading.Thread] = []
    returned: list[str] = []

    def start(*where: int, **more: Any) -> list[str]:
        threads.append(threading.Thread(target=lambda: returned.append(str(_join(*where, **more)))))
        threads[-1].start()
        return returned

    yield start
    for thread in threads:
        thread.join()


def test_missing_ranks_are_named(elsewhere: Callable[..., list[str]]) -> None:
    """At the deadline the error names the missing ranks and the connected ones."""
    port = free_port()
    elsewhere(0, port, 4)
    said = str(_join(2, port, 4))
    assert (
        "ranks 1, 3 of 4 did not connect in time; connected: rank 0 on " in said
        and f"rank 2 on {socket.gethostname()}" in said
    )


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (1, {"rank": 1}, "two processes claim rank 1: "),
        (
            0,
            {"rank": 1, "world_size": 2},
            'rank 1 passed {"world_size": 2, "backend": "gloo"}, but the first rank that connected passed {"',
        ),
        (
            0,
            {"rank": 1, "backend": "nccl"},
            '"backend": "nccl"}, but the first rank that connected passed {"world_size": 3, "backend": "gloo',
        ),
    ],
)
def test_conflicting_processes(
    elsewhere: Callable[..., list[str]], first: int, then: dict[str, Any], said: str
) -> None:
    """Two processes with one rank, or with different settings for one name, fail at once, on all ranks."""
    port = free_port()
    for rank in range(first + 1):
        returned = elsewhere(rank, port, seconds=30)
    time.sleep(1)
    assert said in str(_join(port=port, seconds=30, **then))
    while len(returned) <= first:
        time.sleep(0.1)
    assert [said in other for other in returned] == [True] * (first + 1)


def test_no_rank_0() -> None:
    """Without rank 0 the error names the address; on a port in use rank 0's error reports that."""
    port = free_port()
    assert f"side group 's' at 127.0.0.1:{port}: rank 1 cannot connect to rank 0: " in str(_join(1, port, seconds=0.5))
    with socket.create_server(("127.0.0.1", port)):
        assert "rank 0 cannot listen there: [Errno 98] Address already in use" in str(_join(0, port))


def test_a_silent_server_times_out() -> None:
    """A foreign server that never responds does not block a process beyond its timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = str(_join(1, silent.getsockname()[1], seconds=0.5))
    assert "rank 1 cannot connect to rank 0: a process listens there but does not respond" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": 2}, "rank is 2, expected 0 to 1"),
        ({"port": 0}, "port is 0, expected 1 to 65535"),
        ({"peers": "sglang"}, "peers is 'sglang', expected hpcinit, torch or vllm"),
    ],
)
def test_invalid_requests(wrong: dict[str, Any], said: str) -> None:
    """An invalid argument is refused before any waiting."""
    assert said in str(_join(**{"rank": 0, "port": 29_400, "world_size": 2, **wrong}))


OTHERS = """
    import sys, torch, torch.distributed as dist
    sys.path.insert(0, {programs!r})
    from vllm_stand_in import join, join_by_torch
    group = {function}("127.0.0.1", {port}, {rank}, 2)
    weight = torch.full((2,), 7.0) if {rank} == 0 else torch.zeros(2)
    dist.broadcast(weight, group_src=0, group=group)
    group.barrier().wait()
    print(weight.tolist())
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("peers", "function"), [("torch", "join_by_torch"), ("vllm", "join")])
def test_a_process_of_another_project(peers: str, function: str, rank: int, tmp_path: Path) -> None:
    """Beside its own group a process shares weights with one that uses a stand-in for vLLM's function, or torch's.

    Each of the two is rank 0 once, which listens and sends.
    """
    port, programs = free_port(), str(Path(__file__).parents[1] / "systems/programs")
    code = OTHERS.format(programs=programs, function=function, port=port, rank=1 - rank)
    other = Rank(code, tmp_path / "other.log", {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = side_group(
            "weights", rank=rank, world_size=2, address="127.0.0.1", port=port, backend="gloo", peers=peers
        )
        weight = torch.full((2,), 7.0) if rank == 0 else torch.zeros(2)
        dist.broadcast(weight, src=0, group=found)
        dist.barrier(group=found)
        status, said = other.end()
        assert status == 0 and weight.tolist() == [7.0, 7.0] and said.splitlines()[-1] == "[7.0, 7.0]", said
        dist.destroy_process_group(found)
    finally:
        other.process.kill()
        other.process.wait()
        dist.destroy_process_group()


@pytest.mark.parametrize("peers", ["torch", "vllm"])
def test_a_missing_process_of_another_project(peers: str) -> None:
    """Without a process that uses vLLM's or torch's functions, rank 0's error names address, time and cause."""
    port = free_port()
    said = str(_join(0, port, 2, peers=peers))
    assert f"side group 's' at 127.0.0.1:{port}: could not form a group of 2 processes within 2 s: " in said
    assert f"Do all other ranks use {peers} with this address, port and number of processes?" in said


def test_a_default_group_that_is_bound_to_a_device_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch creates the side group it does not see the default group's device, which is restored afterwards.

    There is no GPU: a gloo group is marked as bound, and the value that torch would read is recorded.
    """
    seen: list[object] = []
    make = c10d._new_process_group_helper

    def recorded(*args: object, **options: object) -> object:
        seen.append(c10d._get_default_group().bound_device_id)
        return make(*args, **options)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
        monkeypatch.setattr(c10d, "_new_process_group_helper", recorded)
        group = _join(0, free_port(), 1)
        assert seen == [None] and c10d._get_default_group().bound_device_id == torch.device("cuda", 0)
        assert "'s' already exists in this process" in str(_join(0, free_port(), 1))
        assert dist.get_world_size(group) == 1  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_binary_data_in_the_store(elsewhere: Callable[..., list[str]]) -> None:
    """Any process can write to the store: binary data is an error with a message, without a traceback."""
    port = free_port()
    returned = elsewhere(0, port, 3, seconds=30)
    store = TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=20), wait_for_workers=False)
    PrefixStore("hpcinit/side/s", store).set("failed", b"\xff\xfe")  # type: ignore[arg-type]
    deadline = time.monotonic() + 20
    while not returned and time.monotonic() < deadline:
        time.sleep(0.05)
    assert returned and "side group 's' at 127.0.0.1" in returned[0] and "\ufffd" in returned[0]
