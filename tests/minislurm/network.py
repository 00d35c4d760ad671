"""The cluster's addresses, and the namespaces of its nodes."""

import ipaddress
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.processes import mark
from tests.minislurm.shell import run

# RFC 2544 reserves 198.18.0.0/15 for tests of interconnects, so no office or cloud network uses it.
POOL = list(ipaddress.ip_network("198.18.0.0/15").subnets(new_prefix=22))
FIRST_NODE = 11  # n1 is x.x.x.11; the login node .1, the controller .2

# $1 host name, $2 mark, $3 hosts file. The sleep outlives the shell and keeps the namespaces.
HOLD = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 "$2" /dev/shm
mount --bind "$3" /etc/hosts
ip link set lo up
sleep infinity </dev/null >/dev/null 2>&1 &
echo $!
"""


@dataclass(frozen=True)
class Network:
    """The subnet of a cluster and the addresses of its nodes."""

    subnet: str  # "198.18.4.0/22"

    def address(self, node: str) -> str:
        """login, ctl, n1, n2, ...; beside: the controller of another cluster"""
        offset = {"login": 1, "ctl": 2, "beside": 3}.get(node) or FIRST_NODE - 1 + int(node.removeprefix("n"))
        return str(ipaddress.ip_network(self.subnet)[offset])

    def interface(self, node: str) -> str:
        """The address with the length of the prefix, as `ip address add` takes it."""
        return f"{self.address(node)}/{self.subnet.rpartition('/')[2]}"


def link_name(cluster: str) -> str:
    """Return the name of the machine's interface to the cluster: a checksum, because names have at most 15 characters."""
    return f"ms-{zlib.crc32(cluster.encode()):08x}"


def free_network(cluster: str) -> Network:
    """Return a subnet that overlaps with no route of this machine; the same one for the same name if possible."""
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]))
    taken = [ipaddress.ip_network(route["dst"]) for route in routes if route["dst"] != "default"]
    first = zlib.crc32(cluster.encode()) % len(POOL)
    for subnet in POOL[first:] + POOL[:first]:
        if not any(subnet.overlaps(other) for other in taken):
            return Network(str(subnet))
    raise MiniSlurmError("every part of 198.18.0.0/15 is routed already (ip route show table all)")


def hold(cluster: str, node: str, hosts_file: Path) -> int:
    """Make the namespaces of a node, and return the pid of the process that keeps them."""
    unshare = ["setsid", "unshare", "--net", "--uts", "--mount", "--propagation", "private"]
    return int(run([*unshare, "sh", "-c", HOLD, "sh", node, mark(cluster, node), str(hosts_file)]))


def allow_neighbors(nodes: int) -> None:
    """Enlarge the kernel's neighbor table, which all namespaces share, so that every rank can connect to every other.

    With more than gc_thresh3 entries (1024), connections fail with 'No route to host', and dmesg has 'neighbor table
    overflow!'. The setting is not reset, because another cluster may need it.
    """
    for number, share in ((1, 4), (2, 2), (3, 1)):
        path = Path(f"/proc/sys/net/ipv4/neigh/default/gc_thresh{number}")
        needed = 2 * nodes * nodes // share
        # Only the machine's main network namespace has these files; a container or a newer Debian does not. The default
        # is enough for 22 nodes.
        if path.exists() and int(path.read_text()) < needed:
            path.write_text(f"{needed}\n")


def make_link(cluster: str, network: Network) -> None:
    """Make this machine's interface to the cluster. Its other end, `login`, is moved to the switch later."""
    name = link_name(cluster)
    run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-in"])
    run(["ip", "address", "add", network.interface("login"), "dev", name])


def make_switch(cluster: str, switch: int) -> None:
    """Make a bridge in the namespace of `switch`, and connect this machine to it.

    A bridge on the machine itself would not work with Docker, which sets the policy of FORWARD to DROP.
    """
    name = link_name(cluster)
    run(["ip", "link", "set", f"{name}-in", "netns", str(switch), "name", "login"])
    run(["ip", "link", "set", name, "up"])
    _in_namespace(switch, "link add br0 type bridge\nlink set br0 up\n")


def wire(network: Network, node: str, pid: int, switch: int, device: str = "eth0", port: str = "") -> None:
    """Make the node's `device` with its address; its other end is in the switch as `port`, or the node's name."""
    _in_namespace(
        pid,
        f"link add {device} type veth peer name {port or node} netns {switch}\n"
        f"address add {network.interface(node)} dev {device}\n"
        f"link set {device} up\n",
    )


def plug(switch: int, nodes: list[str]) -> None:
    _in_namespace(switch, "".join(f"link set {node} master br0 up\n" for node in nodes))


def _in_namespace(pid: int, lines: str) -> None:
    run(["nsenter", "--target", str(pid), "--net", "ip", "-batch", "-"], stdin=lines)


def remove_link(cluster: str) -> None:
    """Remove the machine's interface. It may disappear at the same time, because its other end is in the switch."""
    name = link_name(cluster)
    try:
        run(["ip", "link", "delete", name])
    except MiniSlurmError:
        if Path("/sys/class/net", name).exists():
            raise
