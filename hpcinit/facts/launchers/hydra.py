"""What names one `mpiexec` of Hydra's, on every node: the port at which it listens to its proxies.

Hydra (4.0.2) gives its ranks no job id. Above each rank stands the proxy that started it:

    /usr/bin/hydra_pmi_proxy --control-port n1:35417 --rmk user --launcher ssh ... --proxy-id 1
"""

from __future__ import annotations

from pathlib import Path

from hpcinit.facts.process import command_lines


def control_port(pid: int, proc: Path = Path("/proc")) -> str:
    """'n1:35417' of the proxy above process `pid`; '' where none is to be seen (another launcher, a container)."""
    for line in command_lines(pid, proc):
        words = line.split("\0")
        if "pmi_proxy" in words[0] and "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
    return ""
