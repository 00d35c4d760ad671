"""This node's network interfaces and addresses, and the candidate ports of a job. Linux."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import ipaddress
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from hpcinit.world.hosts import Resolver, resolve

SIOCGIFCONF = 0x8912  # linux/sockios.h: all IPv4 addresses, with the names of their interfaces
_IFREQ = 40  # bytes of struct ifreq on 64 bits: 16 of name, 2 of family, 2 of port, 4 of address, and padding
_MOST = 512


def holding(address: str) -> str:
    """Return the interface that has `address`, such as 'eth0', or '' if none has it or that cannot be read."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    try:
        found = _ipv4() if wanted.version == 4 else _ipv6()
    except (OSError, ValueError):
        return ""
    # An address with its own label is listed as 'eth0:1'.
    return next((name.partition(":")[0] for name, held in found if held == wanted), "")


def towards(address: str) -> str:
    """Return this node's address from which the kernel would reach `address`, or '' without a route. Send nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def default_address() -> str:
    """Return this node's address on its default route, or else its first one that is not loopback or link-local; ''
    without any. The addresses of the range for documentation are never contacted."""
    for elsewhere in ("192.0.2.1", "2001:db8::1"):
        if found := towards(elsewhere):
            return found
    with contextlib.suppress(OSError, ValueError):
        found_here: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [ip for _, ip in _ipv4()]
        found_here += [ip for _, ip in _ipv6()]
        return next((str(ip) for ip in found_here if not (ip.is_loopback or ip.is_link_local)), "")
    return ""


def blind_spot(name: str, resolver: Resolver = resolve) -> str:
    """Return why other nodes could not connect to a program that listens at this node's own `name`; '' if they can.

    gloo uses the first of the name's addresses that it can bind, and loopback if there is none
    (torch, GlooDeviceFactory.cpp). Debian's installer maps a machine's own name to 127.0.1.1.
    """
    try:
        bound = _first_of_ours(resolver(name))
    except OSError as error:
        return f"{name} does not resolve on {name} itself ({error.strerror or error})"
    if not bound:
        return f"{name} is not an address of this node on {name} itself"
    return f"{name} is {bound} on {name} itself" if ipaddress.ip_address(bound).is_loopback else ""


def interface_names() -> tuple[str, ...]:
    """Return the names of this node's interfaces, sorted, with labels of addresses such as 'eth0:1'."""
    found = {name for _, name in socket.if_nameindex()}
    with contextlib.suppress(OSError, ValueError):  # labels are rare
        found.update(name for name, _ in _ipv4())
    return tuple(sorted(found))


def unmatched_by_gloo(value: str, there: Collection[str]) -> list[str]:
    """Return the names in GLOO_SOCKET_IFNAME, 'eth0,eth1', that do not exist. torch requires all of them, in full.

    torch (2.13) ignores a value of one character.
    """
    return [name for name in value.split(",") if name and name not in there] if len(value) > 1 else []


def unmatched_by_nccl(value: str, there: Collection[str]) -> list[str]:
    """Return [value] if NCCL_SOCKET_IFNAME selects none of the interfaces, else [].

        eth,ib              those that start with one of these      =eth0,ib0       exactly these
        ^docker,lo          all but those that start so             ^=docker0       all but exactly this

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
    """
    listed = value.removeprefix("^")
    exact = listed.startswith("=")
    # "eth0:1234" is an interface and a port.
    wanted = [word.partition(":")[0] for word in listed.removeprefix("=").split(",")]
    wanted = [word for word in wanted if word]
    if len(value) <= 1 or not wanted:
        return []
    named = {name for name in there if (name in wanted if exact else name.startswith(tuple(wanted)))}
    return [] if (named != set(there) if value.startswith("^") else named) else [value]


# The backend that reads a variable, and how it reads it.
READS: dict[str, tuple[str, Callable[[str, Collection[str]], list[str]]]] = {
    "GLOO_SOCKET_IFNAME": ("gloo", unmatched_by_gloo),
    "NCCL_SOCKET_IFNAME": ("nccl", unmatched_by_nccl),
}


def of_this_node(addresses: Sequence[str]) -> bool:
    """Return whether one of `addresses` belongs to this node."""
    return bool(_first_of_ours(addresses))


def _first_of_ours(addresses: Sequence[str]) -> str:
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return address.partition("%")[0]
    return ""


def _ipv4() -> list[tuple[str, ipaddress.IPv4Address]]:
    buffer = array.array("B", bytes(_MOST * _IFREQ))
    at, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, SIOCGIFCONF, struct.pack("iP", size, at))
    filled = struct.unpack("iP", answer)[0]
    entries = [buffer[i : i + _IFREQ].tobytes() for i in range(0, filled, _IFREQ)]
    return [(e[:16].partition(b"\0")[0].decode(errors="replace"), ipaddress.IPv4Address(e[20:24])) for e in entries]


def _ipv6() -> list[tuple[str, ipaddress.IPv6Address]]:
    # "fd000000000000000000000000000002 02 40 00 80     eth0"
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return [(words[5], ipaddress.IPv6Address(bytes.fromhex(words[0]))) for words in lines]


# Ports for the rendezvous: every rank computes them, outside the range that the kernel hands out.

# Linux gives ports 32768-60999 to outgoing connections (net.ipv4.ip_local_port_range), so a listener
# there sometimes fails: https://github.com/NVIDIA/enroot/issues/243. Services use ports below 20000.
FIRST_PORT, LAST_PORT = 20_000, 32_767
PORT_COUNT = 8
# Some systems give 9000-65000 to outgoing connections. Rank 0 uses these candidates there.
LOW_FIRST_PORT, LOW_LAST_PORT = 5_000, 8_999
LOW_PORT_COUNT = 3
EPHEMERAL, RESERVED = "ip_local_port_range", "ip_local_reserved_ports"
_SYSCTL = Path("/proc/sys/net/ipv4")  # also for IPv6


def candidate_ports(job: str) -> tuple[int, ...]:
    """Return PORT_COUNT + LOW_PORT_COUNT different ports for one start of one job, the same on every rank.

    job: the name of the job, its step and its restart. A hash spreads the ports: jobs with consecutive ids share
    nodes, and consecutive ports would collide when one job needs two.
    """
    span, low_span = LAST_PORT - FIRST_PORT + 1, LOW_LAST_PORT - LOW_FIRST_PORT + 1
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    # A stride coprime to the spans (12768 = 2^5 x 3 x 7 x 19, and 4000 = 2^5 x 5^3) never repeats within them.
    usual = (FIRST_PORT + (start + i * 1009) % span for i in range(PORT_COUNT))
    return (*usual, *(LOW_FIRST_PORT + (start + i * 1009) % low_span for i in range(LOW_PORT_COUNT)))


def outside_ephemeral(candidates: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Return the candidates with those first that this node does not give to outgoing connections, and a warning if
    there are fewer than the two that rank 0 needs ('' otherwise)."""
    try:
        first, last = map(int, (_SYSCTL / EPHEMERAL).read_text().split())
        reserved = _port_set((_SYSCTL / RESERVED).read_text())
    except (OSError, ValueError):  # not Linux, or hidden in a container
        return tuple(candidates), ""
    given = {port for port in candidates if first <= port <= last and port not in reserved}
    ordered = tuple(sorted(candidates, key=lambda port: port in given))
    if len(candidates) - len(given) >= 2:
        return ordered, ""
    return ordered, (
        f"{socket.gethostname()} gives ports {first}-{last} to outgoing connections (net.ipv4.{EPHEMERAL}), which "
        f"contain {len(given)} of the {len(candidates)} candidate ports: another program may be using one. The "
        f"administrator can keep them free: sysctl net.ipv4.{RESERVED}={FIRST_PORT}-{LAST_PORT}"
    )


def _port_set(text: str) -> frozenset[int]:
    """Return the ports of '8080,9148-9150'."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(port for first, _, last in parts for port in range(int(first), int(last or first) + 1))
