"""What names one `mpiexec` of Hydra's, on every node: the port at which it listens to its proxies.

Hydra (4.0.2) gives its ranks no job id. Above each rank stands the proxy that started it:

    /usr/bin/hydra_pmi_proxy --control-port n1:35417 --rmk user --launcher ssh ... --proxy-id 1
"""

from __future__ import annotations

from pathlib import Path

GENERATIONS = 64


def control_port(pid: int, proc: Path = Path("/proc")) -> str:
    """'n1:35417' of the proxy above process `pid`; '' where none is to be seen (another launcher, a container)."""
    for _ in range(GENERATIONS):
        words = _read(proc / str(pid) / "cmdline").split("\0")
        if "pmi_proxy" in words[0] and "--control-port" in words[:-1]:
            return words[words.index("--control-port") + 1]
        # "4242 (name with ) and blanks) S 4241 ...": the parent is the second word after the last bracket
        after = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(after) < 2 or int(after[1]) < 2:
            return ""
        pid = int(after[1])
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
