"""Errors that prevent the process group, one message each. Real torch, real interfaces, one rank."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from hpcinit.base.errors import BringUpError
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
    """Every rank's error names the variable, the key, the interface and the existing ones, without torch's error."""
    with ranks(INIT, 2, tmp_path, GLOO_SOCKET_IFNAME="lo,eth9") as started:
        logs = [rank.end()[1] for rank in started]
    for log in logs:
        assert "Traceback" not in log and "cause: NoneType" in log, log
        # Which interfaces this machine has changes while other tests start clusters.
        there = r"which has \S.*\(GLOO_SOCKET_IFNAME=lo,eth9, from cluster\.interface\)\. Set cluster\.interface to one"
        assert re.search(rf"error: eth9 matches no interface of {HERE}, {there}", log), log


def test_each_backend_has_its_variable() -> None:
    """NCCL's variable is checked only for NCCL, gloo's only for gloo, and both for a group with both."""
    wrong = {"NCCL_SOCKET_IFNAME": "=eth9", "GLOO_SOCKET_IFNAME": "lo"}
    process_group.refuse_interfaces(wrong, "gloo")
    process_group.refuse_interfaces({**wrong, "NCCL_SOCKET_IFNAME": "^eth9"}, "nccl")
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(BringUpError, match=r"^=eth9 matches no interface of .* \(NCCL_SOCKET_IFNAME==eth9, "):
            process_group.refuse_interfaces(wrong, backend)


def test_an_error_of_torchs_own(tmp_path: Path) -> None:
    """torch's error becomes a BringUpError with torch's first line, and is its cause."""
    # torch itself refuses the empty name between the commas, with a RuntimeError.
    with ranks(INIT, 1, tmp_path, GLOO_SOCKET_IFNAME="lo,,lo") as (rank,):
        log = rank.end()[1]
    assert f"error: torch could not create the process group (gloo) on rank 0, {HERE}: " in log, log
    assert "interface or hostname can't be empty; for more output set TORCH_CPP_LOG_LEVEL=INFO" in log
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
