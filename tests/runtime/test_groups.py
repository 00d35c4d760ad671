"""Side groups: a job's rank 0 with a process outside, and what is said when somebody does not come."""

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
from torch._C._distributed_c10d import PrefixStore, TCPStore
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
    """With DeepSpeed on top rank 0 sends weights to a process that has no other group, and the job's own steps go on."""
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


def _join(rank: int, port: int, world_size: int = 3, *, seconds: float = 2.0, backend: str = "gloo") -> object:
    """The group, or what was raised."""
    patience = timedelta(seconds=seconds)
    try:
        return side_group(
            "s", rank=rank, world_size=world_size, address="127.0.0.1", port=port, backend=backend, timeout=patience
        )
    except HpcinitError as error:
        return str(error)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """`elsewhere(rank, ...)` joins in another thread, which stands for a process: none gets as far as torch's group.

    What they return is in the list once they have ended.
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


def test_who_never_came_is_named(elsewhere: Callable[..., list[str]]) -> None:
    """At the deadline those who came name the ranks that did not, and who is there."""
    port = free_port()
    elsewhere(0, port, 4)
    said = str(_join(2, port, 4))
    assert "ranks 1, 3 of 4 never came; here are rank 0 on " in said and f"rank 2 on {socket.gethostname()}" in said


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (1, {"rank": 1}, "two processes claim rank 1: "),
        (
            0,
            {"rank": 1, "world_size": 2},
            'rank 1 asks for {"world_size": 2, "backend": "gloo"}, and who came first for',
        ),
        (
            0,
            {"rank": 1, "backend": "nccl"},
            '"backend": "nccl"}, and who came first for {"world_size": 3, "backend": "g',
        ),
    ],
)
def test_processes_that_do_not_fit_together(
    elsewhere: Callable[..., list[str]], first: int, then: dict[str, Any], said: str
) -> None:
    """Two that claim a rank, or that mean another group by the name, are told so at once, and all others too."""
    port = free_port()
    for rank in range(first + 1):
        returned = elsewhere(rank, port, seconds=30)
    time.sleep(1)
    assert said in str(_join(port=port, seconds=30, **then))
    while len(returned) <= first:
        time.sleep(0.1)
    assert [said in other for other in returned] == [True] * (first + 1)


def test_nobody_there() -> None:
    """Without rank 0 the others say where they looked; rank 0 on a taken port says that it is taken."""
    port = free_port()
    assert f"side group 's' at 127.0.0.1:{port}: rank 1 did not find rank 0: " in str(_join(1, port, seconds=0.5))
    with socket.create_server(("127.0.0.1", port)):
        assert "rank 0 cannot listen there: [Errno 98] Address already in use" in str(_join(0, port))


def test_a_silent_server_is_given_up() -> None:
    """A foreign server that answers nothing does not hold a process beyond its timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = str(_join(1, silent.getsockname()[1], seconds=0.5))
    assert "rank 1 did not find rank 0: somebody listens there who says nothing" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"rank": 2}, "rank is 2, expected 0 to 1"), ({"port": 0}, "port is 0, expected 1 to 65535")],
)
def test_requests_that_cannot_be(wrong: dict[str, int], said: str) -> None:
    """A rank outside the group and a port that is none are refused before anybody waits."""
    asked = {"rank": 0, "port": 29_400, **wrong}
    assert said in str(_join(asked["rank"], asked["port"], 2))


def test_a_default_group_that_is_bound_to_a_device_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch makes the side group it does not see the default group's device, and afterwards it is back.

    There is no GPU: a gloo group is marked as bound, and what torch would look at is recorded.
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
        assert "'s' exists in this process" in str(_join(0, free_port(), 1))
        assert dist.get_world_size(group) == 1  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_bytes_of_another_program_are_shown(elsewhere: Callable[..., list[str]]) -> None:
    """Whoever reaches the port can write to the store: what is no text is an error with a message, and no traceback."""
    port = free_port()
    returned = elsewhere(0, port, 3, seconds=30)
    store = TCPStore("127.0.0.1", port, 3, False, timedelta(seconds=20), wait_for_workers=False)
    PrefixStore("hpcinit/side/s", store).set("failed", b"\xff\xfe")  # type: ignore[arg-type]
    deadline = time.monotonic() + 20
    while not returned and time.monotonic() < deadline:
        time.sleep(0.05)
    assert returned and "side group 's' at 127.0.0.1" in returned[0] and "\ufffd" in returned[0]
