"""Finds the network interface that NCCL will use on this node, before the ranks start."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcinit.records.node_facts import Address, Nccl

LIBRARY = "libnccl.so.2"
VARIABLE = "NCCL_SOCKET_IFNAME"
NO_LIBRARY = 3  # exit status of ask_nccl.py
# NCCL INFO Bootstrap: Using eth0:10.1.0.7<0>          older: Bootstrap : Using [0]eth0:10.1.0.7<0>
_USING = re.compile(r"NCCL INFO Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):(\S+?)<\d+>")


def is_used(env: Mapping[str, str], backend: str) -> bool:
    """Return whether the ranks will probably use NCCL.

    They do if `backend` names nccl, or if it is 'auto' and the job has NVIDIA GPUs.
    """
    gpus = env.get("SLURM_STEP_GPUS") or env.get("SLURM_JOB_GPUS") or Path("/dev/nvidiactl").exists()
    return "nccl" in backend or (backend == "auto" and bool(gpus))


def ask(env: Mapping[str, str], host: str, timeout_s: float) -> Nccl | None:
    """Return the interface that NCCL uses if its environment is `env`, or None if there is no NCCL.

    Use the NCCL that torch would load: a package beside torch, or else the library that the loader finds.
    """
    started = time.monotonic()
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("ask_nccl.py")), _library()]
    # These variables have precedence over nccl.conf. NCCL_COMM_ID would contain another node's address.
    child = {**env, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,BOOTSTRAP", "NCCL_DEBUG_FILE": ""}
    child.pop("NCCL_COMM_ID", None)
    wanted = env.get(VARIABLE, "")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=child,
        )
    except subprocess.TimeoutExpired:
        late = f"NCCL did not answer in {timeout_s:.1f} s"
        return Nccl(host, error=late, wanted=wanted, addresses=tuple(addresses()))
    except OSError:
        return None
    if done.returncode == NO_LIBRARY:
        return None
    took = time.monotonic() - started
    try:
        result = json.loads(done.stderr.splitlines()[-1])
        failed, text, version = bool(result["status"]), str(result["error"]), str(result["version"])
    except (ValueError, IndexError, KeyError, TypeError):
        failed, text, version = True, f"NCCL ended with status {done.returncode}", ""
    interface, address = _parse_choice(done.stdout) if not failed else ("", "")
    error = (text or "NCCL printed no reason") if failed else ""
    return Nccl(host, interface, address, error, wanted, version, tuple(addresses()), round(took, 3))


def _parse_choice(log: str) -> tuple[str, str]:
    found = _USING.search(log)
    return (found[1], found[2].partition("%")[0]) if found else ("", "")


def _library() -> str:
    found = (Path(folder) / "nvidia/nccl/lib" / LIBRARY for folder in sys.path if folder)
    return next((str(path) for path in found if path.exists()), LIBRARY)


def addresses() -> Iterator[Address]:
    """Yield the addresses of this node's network interfaces that are up."""
    import psutil  # noqa: PLC0415 - only where NCCL is used

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family in {socket.AF_INET, socket.AF_INET6} and one.netmask and name in up:
                address = one.address.partition("%")[0]
                yield Address(name, address, _bits(one.netmask))


def _bits(netmask: str) -> int:
    return int(ipaddress.ip_address(netmask)).bit_count()
