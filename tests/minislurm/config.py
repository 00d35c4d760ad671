"""The cluster's files: slurm.conf, gres.conf, cgroup.conf, slurmdbd.conf and hosts."""

import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.minislurm.network import Network


@dataclass(frozen=True)
class Shape:
    """The size and options of a cluster."""

    nodes: int = 4
    gpus: int = 8
    cpus: int = 16
    accounting: bool = False
    options: Mapping[str, str] = field(default_factory=dict)  # lines of slurm.conf to set or to replace
    partitions: Mapping[str, str] = field(default_factory=dict)  # further ones: name to options, as in "Hidden=YES"
    dbd: str = ""  # address of another cluster's slurmdbd

    @property
    def node_names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.nodes + 1)]


def slurm_conf(name: str, shape: Shape, network: Network, directory: Path) -> str:
    entries = {
        "ClusterName": name,
        "SlurmctldHost": f"ctl({network.address('ctl')})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={directory}/munge.sock",
        "SlurmctldPidFile": f"{directory}/run/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/run/%n.pid",
        "StateSaveLocation": f"{directory}/state",
        "SlurmdSpoolDir": f"{directory}/spool/%n",
        "SlurmctldLogFile": f"{directory}/log/slurmctld.log",
        "SlurmdLogFile": f"{directory}/log/%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        # Without this a node that claims more CPUs than the machine has is drained as invalid.
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        # Look for work every second rather than every minute: a test waits for it.
        "SchedulerParameters": "sched_interval=1,batch_sched_delay=0,bf_interval=1",
        "ReturnToService": "2",  # a node that was down is used again as soon as it reports
        "SlurmctldTimeout": "30",
        "SlurmdTimeout": "10",  # an unresponsive node is lost after 10 s instead of 300
        "KillWait": "3",  # between SIGTERM and SIGKILL; 30 by default
        "InactiveLimit": "0",
        "GresTypes": "gpu",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        **_accounting(shape.dbd or (network.address("ctl") if shape.accounting else ""), directory),
        **shape.options,
    }
    lines = [f"{key}={value}" for key, value in entries.items()]
    has = f"CPUs={shape.cpus} RealMemory=4000" + (f" Gres=gpu:{shape.gpus}" if shape.gpus else "")
    for node in shape.node_names:
        lines.append(f"NodeName={node} NodeAddr={network.address(node)} {has}")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=1:00:00 State=UP PriorityTier=1")
    lines.append("PartitionName=high Nodes=ALL MaxTime=1:00:00 State=UP PriorityTier=10")
    lines += [f"PartitionName={name} Nodes=ALL State=UP {own}" for name, own in shape.partitions.items()]
    return "\n".join(lines) + "\n"


def _accounting(host: str, directory: Path) -> dict[str, str]:
    if not host:
        return {
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none",
        }
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": host,
        "AccountingStoragePass": f"{directory}/munge.sock",  # for auth/munge this is the socket
        "JobAcctGatherType": "jobacct_gather/linux",
    }


def slurmdbd_conf(network: Network, directory: Path) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
DbdHost=ctl
DbdAddr={network.address("ctl")}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=3306
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/run/slurmdbd.pid
"""


def hosts(shape: Shape, network: Network) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    lines.append(f"{network.address('login')} login {socket.gethostname()}")
    lines += [f"{network.address(node)} {node}" for node in ["ctl", *shape.node_names]]
    return "\n".join(lines) + "\n"


def cgroup_conf(version: str) -> str:
    """Disable cgroups, so that a cluster starts with any version of them.

    By default slurmd requests a scope from systemd, or exits if it cannot use the cgroups. 'disabled' exists since
    23.02; before, the plugin for version 1 does nothing unless it is used.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    return f"CgroupPlugin={'disabled' if (major, minor) >= (23, 2) else 'cgroup/v1'}\n"


def write(name: str, version: str, shape: Shape, network: Network, directory: Path) -> None:
    """Create the cluster's folder: configuration, key, stand-in GPUs, and the folders of the daemons."""
    for folder in ("etc", "run", "log", "state", "gpu", *(f"spool/{node}" for node in shape.node_names)):
        (directory / folder).mkdir(parents=True, exist_ok=True, mode=0o755)
    (directory / "etc/slurm.conf").write_text(slurm_conf(name, shape, network, directory))
    (directory / "etc/cgroup.conf").write_text(cgroup_conf(version))
    (directory / "etc/hosts").write_text(hosts(shape, network))
    _private(directory / "etc/munge.key", os.urandom(1024))
    _private(directory / "etc/slurmdbd.conf", slurmdbd_conf(network, directory).encode())
    gres = ""
    if shape.gpus:
        # With File= Slurm sets CUDA_VISIBLE_DEVICES as on a real node; with Count= alone it does not.
        gres = f"NodeName=n[1-{shape.nodes}] Name=gpu File={directory}/gpu/nvidia[0-{shape.gpus - 1}]\n"
        for number in range(shape.gpus):
            os.mknod(directory / f"gpu/nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null
    (directory / "etc/gres.conf").write_text(gres)


def _private(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
