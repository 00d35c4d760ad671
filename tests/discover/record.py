"""Record the output of discover's commands on a real Slurm with different kinds of nodes and partitions.

    python -m tests.discover.record                                                 Debian bookworm: 22.05
    python -m tests.minislurm.newer_debian .venv/bin/python -m tests.discover.record      24.11

Writes tests/data/discover/<version>.json with the output of each command. Needs root. The nodes big*, old* and cpu* have
no daemon, like nodes that are down.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hpcinit.discover import live_site
from tests.minislurm import MiniSlurm
from tests.minislurm.running import until

DATA = Path(__file__).parent.parent / "data/discover"
# Keys and values are joined with '=' to lines of slurm.conf.
MIXED = {
    "MaxArraySize": "501",
    "DefMemPerCPU": "200",
    "NodeName=big[1-3] NodeAddr": '127.0.0.2 CPUs=96 Sockets=2 CoresPerSocket=24 ThreadsPerCore=2 RealMemory=1031000 '
    'MemSpecLimit=4096 Gres=gpu:a100:4 Feature=a100,ib State=DOWN Reason="disk 3: CPUTot=999 RealMemory=9 is bad"',
    "NodeName=big4 NodeAddr": "127.0.0.2 CPUs=96 Sockets=2 CoresPerSocket=24 ThreadsPerCore=2 RealMemory=1031000 "
    "MemSpecLimit=4096 Gres=gpu:a100:4 Feature=a100,ib,noisy State=DOWN",
    "NodeName=old[1-2] NodeAddr": "127.0.0.2 CPUs=32 RealMemory=192000 Gres=gpu:v100:2,gpu:t4:1 Feature=v100 State=DOWN",
    "NodeName=cpu[01-12] NodeAddr": "127.0.0.2 CPUs=128 RealMemory=256000 Feature=cpu State=DOWN",
    "PartitionName=gpu Nodes": "big[1-4],old[1-2] MaxTime=2-00:00:00 DefaultTime=30 OverSubscribe=EXCLUSIVE MaxNodes=3",
    "PartitionName=cpu Nodes": "cpu[01-12] MaxTime=UNLIMITED MaxMemPerNode=200000 MaxCPUsPerNode=64 DefMemPerNode=9000 State=DRAIN",
    "PartitionName=secret Nodes": "old1 Hidden=YES MaxTime=10",
    "PartitionName=chem Nodes": "old2 AllowAccounts=chem MaxTime=10",
    "PartitionName=staff Nodes": "old2 AllowGroups=slurm MaxTime=10",
    "PartitionName=off Nodes": "old2 State=INACTIVE",
    "PartitionName=empty Nodes": "\"\"",
}  # fmt: skip


class Mixed(MiniSlurm):
    """Partition main has all nodes, also those without a daemon: only n* become idle."""

    def wait_idle(self, timeout_s: float = 60) -> None:
        until(
            lambda: {self.node_states().get(node) for node in self.nodes} == {"idle"},
            lambda: str(self.node_states()),
            timeout_s,
        )


def main() -> None:
    with Mixed(nodes=2, accounting=True, name=f"mixed-{os.getpid()}", options=MIXED) as cluster:
        cluster.run("sacctmgr", "--immediate", "add", "account", "phys")
        cluster.run("sacctmgr", "--immediate", "add", "user", "root", "account=phys")
        cluster.run(
            "sacctmgr", "--immediate", "modify", "user", "root", "set", "defaultaccount=phys", "defaultqos=normal"
        )
        answers = live_site.query_site("root", {**os.environ, **cluster.env})
        assert not answers.silent, answers.silent
        DATA.mkdir(exist_ok=True)
        path = DATA / f"{cluster.version()}.json"
        text = json.dumps(dict(answers.texts), indent=1).replace(cluster.name, "mixed")
        path.write_text(text + "\n")
        print(path)


if __name__ == "__main__":
    main()
