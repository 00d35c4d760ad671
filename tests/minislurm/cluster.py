"""Start and stop a cluster."""

import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.minislurm import accounting as accounting_daemons
from tests.minislurm import config, network
from tests.minislurm.daemons import daemon_pid, launch, wait_started
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.packages import missing
from tests.minislurm.processes import kill_all, start_time
from tests.minislurm.running import RunningCluster

BASE = Path("/var/lib/minislurm")  # one folder per cluster, by its name


class MiniSlurm(RunningCluster):
    """N nodes n1..nN and a controller ctl; partitions main (default) and high, which preempts main (requeue).

    `options` are lines of slurm.conf to set or to replace: {"MaxArraySize": "11"}. `partitions` adds partitions of all
    nodes, each with its own options: {"secret": "Hidden=YES"}. `beside` is a running cluster whose slurmdbd, munge key
    and network the new one shares, so that its clients reach this one with --clusters. A cluster belongs to the process
    that started it unless `owned` is false; `sweep()` stops those whose owner has ended.
    """

    def __init__(
        self, nodes: int = 4, gpus: int = 8, accounting: bool = False, name: str = "hpcinit",
        directory: Path | None = None, *, cpus: int = 16, options: Mapping[str, str] | None = None,
        partitions: Mapping[str, str] | None = None, owned: bool = True, beside: RunningCluster | None = None,
    ) -> None:  # fmt: skip
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
            raise MiniSlurmError(f"bad cluster name {name!r}: expected at most 32 of a-z, 0-9 and '-'")
        if not 1 <= nodes <= 1000:
            raise MiniSlurmError(f"{nodes} nodes: expected 1 to 1000 (a bridge has 1024 ports)")
        super().__init__(name, Path(directory).absolute() if directory else BASE / name)
        if len(str(self.directory)) > 80:
            raise MiniSlurmError(f"{self.directory}: too long, the path of a socket ends at 107 characters")
        dbd = beside.address("ctl") if beside else ""
        self.shape = config.Shape(nodes, gpus, cpus, accounting, dict(options or {}), dict(partitions or {}), dbd)
        self._beside = beside
        self._owner = [os.getpid(), start_time(os.getpid())] if owned else None

    def __enter__(self) -> "MiniSlurm":
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> "MiniSlurm":
        """Start the cluster, after removing a leftover of the same name. Idempotent."""
        lacks = missing(self.shape.accounting)
        if lacks:
            raise MiniSlurmError("this machine lacks: " + "; ".join(lacks))
        if self._is_up():
            return self
        self._claim()
        try:
            self._make()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """End every process of the cluster, and remove its interface and its folder. Idempotent."""
        self._clear()
        with _one_at_a_time(), suppress(OSError):  # OSError: it contains another cluster
            BASE.rmdir()

    def _clear(self) -> None:
        left = self._left_state()
        if left and left["owner"] != self._owner and _alive(left["owner"]):
            raise MiniSlurmError(f"cluster {self.name!r} belongs to process {left['owner'][0]}, which still runs")
        kill_all(self.name)
        network.remove_link(self.name)
        if left:
            while self.directory.exists():
                with suppress(FileNotFoundError):  # a daemon's last file, or another process removes it too
                    shutil.rmtree(self.directory)
        elif self.directory.exists() and any(self.directory.iterdir()):
            raise MiniSlurmError(f"{self.directory} is not a cluster's folder: it has files, but no minislurm.json")

    def _is_up(self) -> bool:
        left = self._left_state()
        if not left or left["shape"] != dataclasses.asdict(self.shape) or left["owner"] != self._owner:
            return False
        pid_files = [self.directory / f"run/{node}.pid" for node in self.nodes]
        return self.answers() and all(daemon_pid(file, self.name) for file in pid_files)

    def _left_state(self) -> dict | None:
        try:
            return self.state
        except (MiniSlurmError, json.JSONDecodeError):
            return None

    def _claim(self) -> None:
        """Reserve the name and a subnet. From here on the folder records the owner, even if this process is killed."""
        with _one_at_a_time():  # until this machine has its interface, the subnet looks free to others
            self._clear()
            net = network.free_network(self.name)
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
            shape = dataclasses.asdict(self.shape)
            state = {"name": self.name, "shape": shape, "owner": self._owner, "subnet": net.subnet}
            (self.directory / "minislurm.json").write_text(json.dumps(state, indent=2))
            network.allow_neighbors(self.shape.nodes)
            network.make_link(self.name, net)

    def _make(self) -> None:
        net = network.Network(self.state["subnet"])
        config.write(self.name, self.version(), self.shape, net, self.directory)
        controller = self._make_nodes(net)
        if self._beside:
            self._connect(self._beside, controller)
        self._start_munged(controller)
        if self.shape.accounting:
            accounting_daemons.start(self.name, net, self.directory, controller)
        self.start_controller()
        for node, slurmd in [(node, self._launch_slurmd(node)) for node in self.nodes]:
            wait_started(slurmd, f"slurmd of {node}", self.log(node))
        self.wait_idle()

    def _make_nodes(self, net: network.Network) -> int:
        """Make the namespaces and connect them; return the pid of the controller's."""
        hosts = self.directory / "etc/hosts"
        nodes = ["ctl", *self.shape.node_names]
        holders = {node: network.hold(self.name, node, hosts) for node in [*nodes, "switch"]}
        network.make_switch(self.name, holders["switch"])
        for node in nodes:
            network.wire(net, node, holders[node], holders["switch"])
        network.plug(holders["switch"], ["login", *nodes])
        (self.directory / "run/holders.json").write_text(json.dumps(holders))
        return holders["ctl"]

    def _connect(self, other: RunningCluster, controller: int) -> None:
        """Give the controller an address in the network of `other`, its munge key, and a place in its slurmdbd."""
        shutil.copy(other.directory / "etc/munge.key", self.directory / "etc/munge.key")
        net, port = network.Network(other.state["subnet"]), network.link_name(self.name)
        network.wire(net, "beside", controller, other._holder("switch"), "eth1", port)
        network.plug(other._holder("switch"), [port])
        other.run("sacctmgr", "--immediate", "add", "cluster", self.name)

    def _start_munged(self, controller: int) -> None:
        """Start munged. It needs --force, because all users may read the folder of its log."""
        run, log = self.directory / "run", self.log("munged")
        files = {
            "key-file": self.directory / "etc/munge.key",
            "socket": self.directory / "munge.sock",
            "log-file": log,
            "pid-file": run / "munged.pid",
            "seed-file": run / "munge.seed",
        }
        command = ["munged", "--force", *(f"--{option}={path}" for option, path in files.items())]
        wait_started(launch(controller, command, self.directory, log), "munged", log)


def names() -> list[str]:
    """Return the clusters that have a folder below BASE, running or left over."""
    return sorted(path.parent.name for path in BASE.glob("*/minislurm.json"))


def sweep() -> list[str]:
    """Stop the clusters whose owner has ended, and return their names. Other sessions and workers are still alive."""
    swept = []
    with _one_at_a_time():  # of two workers that start at the same time, only one removes a leftover
        for name in names():
            cluster = MiniSlurm(name=name)
            owner = (cluster._left_state() or {}).get("owner")
            if owner and not _alive(owner):
                cluster._clear()
                swept.append(name)
    return swept


def _alive(owner: list[int] | None) -> bool:
    return owner is not None and start_time(owner[0]) == owner[1]


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    descriptor = _locked()
    try:
        yield
    finally:
        os.close(descriptor)


def _locked() -> int:
    """Return a descriptor of BASE with its lock. If another process removed the folder during the wait, retry: a lock
    on a removed folder protects nothing."""
    while True:
        BASE.mkdir(parents=True, exist_ok=True, mode=0o755)
        try:
            descriptor = os.open(BASE, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), BASE.stat()):
                return descriptor
        os.close(descriptor)
