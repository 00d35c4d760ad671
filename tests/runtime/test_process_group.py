"""Errors that prevent the process group, one message each. Real torch, real interfaces, one rank."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from hpcinit.runtime import process_group
from tests.runtime.spawned import ranks

HERE = socket.gethostname()

INIT = """
    import hpcinit
    from hpcinit.base.errors import BringUpError
    try:
        hpcinit.init()
    except BringUpError as error:
        print("error:", error)
        print("cause:", type(error.__cause__).__name__)
"""


def test_a_missing_interface(tmp_path: Path) -> None:
    """The error has torch's reason, the variable, the key and the existing interfaces."""
    with ranks(INIT, 2, tmp_path, GLOO_SOCKET_IFNAME="lo,eth9") as started:
        logs = [rank.end()[1] for rank in started]
    # The first rank that fails ends the others, which print its error.
    reason = (
        r"Unable to find address for: eth9; check GLOO_SOCKET_IFNAME=lo,eth9 \(cluster.interface\): this node has lo,"
    )
    assert any(re.search(reason, log) for log in logs), logs


def test_an_error_of_torchs_own(tmp_path: Path) -> None:
    """torch's error becomes a BringUpError with torch's first line, and is its cause."""
    # torch itself refuses the empty name between the commas, with a RuntimeError.
    with ranks(INIT, 1, tmp_path, GLOO_SOCKET_IFNAME="lo,,lo") as (rank,):
        log = rank.end()[1]
    assert f"error: torch could not create the process group (gloo) on rank 0, {HERE}: " in log, log
    assert (
        "interface or hostname can't be empty; check GLOO_SOCKET_IFNAME=lo,,lo (cluster.interface): this node has"
        in log
    )
    assert "; for more output, set TORCH_CPP_LOG_LEVEL=INFO" in log
    assert "cause: RuntimeError" in log


def test_the_summary_of_an_error() -> None:
    """The summary is torch's first line, with NCCL's reason from the end; or the type of an error without text."""
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
