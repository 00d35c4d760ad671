"""What keeps the process group from being made, in one message each. Real torch, real interfaces, one rank."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpcinit.base.errors import BringUpError
from hpcinit.runtime import process_group
from hpcinit.world import network
from tests.runtime.spawned import ranks

HERE = socket.gethostname()

INIT = """
    import hpcinit
    from hpcinit.base.errors import BringUpError
    try:
        hpcinit.init()
    except BringUpError as error:
        print("said:", error)
        print("cause:", type(error.__cause__).__name__)
"""


def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    """init names the variable, the key, the interface and those that there are, on every rank, without torch's error."""
    with ranks(INIT, 2, tmp_path, GLOO_SOCKET_IFNAME="lo,eth9") as started:
        logs = [rank.end()[1] for rank in started]
    for log in logs:
        assert "Traceback" not in log and "cause: NoneType" in log, log
        assert (
            "said: GLOO_SOCKET_IFNAME is lo,eth9 (the config's cluster.interface sets it), and eth9 fits no interface of "
            f"{HERE}: it has {', '.join(network.interface_names())}; name one that every node has, or none "
            "(cluster.interface=null), for gloo and NCCL to choose by themselves\n"
        ) in log


def test_each_backend_has_its_variable() -> None:
    """NCCL's is read for NCCL alone, gloo's for gloo, both where a group has both."""
    wrong = {"NCCL_SOCKET_IFNAME": "=eth9", "GLOO_SOCKET_IFNAME": "lo"}
    process_group.refuse_interfaces(wrong, "gloo")
    process_group.refuse_interfaces({**wrong, "NCCL_SOCKET_IFNAME": "^eth9"}, "nccl")
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(BringUpError, match=r"^NCCL_SOCKET_IFNAME is =eth9 .*, and =eth9 fits no interface of "):
            process_group.refuse_interfaces(wrong, backend)


def test_an_error_of_torchs_own(tmp_path: Path) -> None:
    """It becomes a BringUpError that keeps torch's first line, and torch's error is its cause."""
    # torch itself refuses the empty name between the commas, with a RuntimeError.
    with ranks(INIT, 1, tmp_path, GLOO_SOCKET_IFNAME="lo,,lo") as (rank,):
        log = rank.end()[1]
    assert f"said: torch did not make the process group (gloo) on rank 0, {HERE}: " in log, log
    assert "interface or hostname can't be empty; TORCH_CPP_LOG_LEVEL=INFO has torch say more" in log
    assert "cause: RuntimeError" in log


def test_the_gist_of_an_error() -> None:
    """torch's first line; of NCCL's many the reason at the end too; a name where there is no text."""
    nccl = (
        "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version 2.27.5\n"
        "ncclSystemError: System call failed.\nLast error:\nBootstrap : no socket interface found\n"
    )
    assert process_group._gist(RuntimeError(nccl)) == (
        "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version 2.27.5 (Bootstrap : no socket "
        "interface found)"
    )
    assert process_group._gist(RuntimeError("one\ntwo")) == "one"
    assert process_group._gist(ValueError()) == "ValueError"
