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
    """The interface that has `address`, such as 'eth0'; '' where none has it or that cannot be told."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    try:
        found = _ipv4() if wanted.version == 4 else _ipv6()
    except (OSError, ValueError):
        return ""
    # An address that was given a label of its own says 'eth0:1'.
    return next((name.partition(":")[0] for name, held in found if held == wanted), "")


def towards(address: str) -> str:
    """The address of this node that the kernel would use to reach `address`; '' without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def blind_spot(name: str, resolver: Resolver = resolve) -> str:
    """Why other nodes could not connect to a program that listens at this node's own `name`; '' if they can.

    gloo takes the first of the name's addresses that it can bind, and loopback where there is none
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
    """What this node's interfaces are called, sorted; labels of addresses, such as 'eth0:1', too."""
    found = {name for _, name in socket.if_nameindex()}
    with contextlib.suppress(OSError, ValueError):  # labels are rare
        found.update(name for name, _ in _ipv4())
    return tuple(sorted(found))


def unmatched_by_gloo(value: str, there: Collection[str]) -> list[str]:
    """What GLOO_SOCKET_IFNAME, 'eth0,eth1', names that is not there. torch wants all of them, each in full.

    One character is as good as none to torch (2.13).
    """
    return [name for name in value.split(",") if name and name not in there] if len(value) > 1 else []


def unmatched_by_nccl(value: str, there: Collection[str]) -> list[str]:
    """What NCCL_SOCKET_IFNAME names, [value], if none of the interfaces that are there is left for NCCL; else [].

        eth,ib              those that begin so             =eth0,ib0       these
        ^docker,lo          all but those that begin so     ^=docker0       all but this

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


# The backend that reads a variable, and how it does.
READS: dict[str, tuple[str, Callable[[str, Collection[str]], list[str]]]] = {
    "GLOO_SOCKET_IFNAME": ("gloo", unmatched_by_gloo),
    "NCCL_SOCKET_IFNAME": ("nccl", unmatched_by_nccl),
}


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


# Ports to meet at: computed by every rank on its own, outside the range that the kernel hands out.

# Linux gives ports 32768-60999 to outgoing connections (net.ipv4.ip_local_port_range), so a listener
# there fails now and then: https://github.com/NVIDIA/enroot/issues/243. Below 20000 services live.
FIRST_PORT, LAST_PORT = 20_000, 32_767
PORT_COUNT = 8


def candidate_ports(job: str) -> tuple[int, ...]:
    """COUNT different ports for one start of one job, the same on every rank.

    job: what names the job, its step and its restart. Spread by a hash, since consecutive job ids share
    nodes and consecutive ports collide as soon as one job needs two.
    """
    span = LAST_PORT - FIRST_PORT + 1
    digest = hashlib.sha256(job.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    # A stride coprime to the span (12768 = 2^5 x 3 x 7 x 19) never repeats within it.
    return tuple(FIRST_PORT + (start + i * 1009) % span for i in range(PORT_COUNT))
