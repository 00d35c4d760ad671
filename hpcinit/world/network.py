"""Finds an address of a node that every other node can reach, and lists this node's own interfaces. Linux only.

If nodes have other names on the cluster's fast network, a template describes them: '{host}i' makes jwb0001i from
jwb0001. A template without {host} is added to the first label: 'i' makes n1i.site from n1.site. Two kinds of addresses
are never used:

- 127.0.1.1: Debian's installer maps a machine's own name to it, and no other node can connect to it.
- fe80::1 (link-local): it means a different machine on each interface.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcinit.base.errors import ConfigError, WorldError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str], Sequence[str]]  # returns a name's addresses; raises OSError if there are none
PLACEHOLDER = "{host}"
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


class Found(NamedTuple):
    """An address of a node.

    note: how the address was found, or ''.
    """

    address: str
    note: str = ""


def rename_host(host: str, template: str) -> str:
    """Return the name of `host` on the network that `template` describes.

    The template contains {host}, as in '{host}-ib0', or is a plain suffix. With the template '', return `host`
    unchanged. Raise ConfigError if the template has more than one {host}, or any other brace. Raise WorldError if the
    result is not a host name.
    """
    rest = template.replace(PLACEHOLDER, "", 1)
    if "{" in rest or "}" in rest:
        raise ConfigError(
            f"the host template {template!r} is invalid, expected {PLACEHOLDER} once and no other braces, as in "
            "'{host}-ib0', or a plain suffix"
        )
    if PLACEHOLDER in template:
        name = template.replace(PLACEHOLDER, host)
    else:
        label, dot, domain = host.partition(".")
        name = host if _is_address(host) else f"{label}{template}{dot}{domain}"
    if not (_is_address(name) or (_NAME.fullmatch(name) and len(name) <= 255)):
        raise WorldError(
            f"the host template {template!r} makes {name!r} from the node name {host!r}, but that is not a host name: "
            "expected letters, digits, '-' and '.'"
        )
    return name


def resolve(host: str) -> Sequence[str]:
    """Return the addresses of a host name, in the system's order. Raise OSError if the name does not resolve."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def find_address(
    host: str,
    nodes: int,
    resolver: Resolver = resolve,
    node_addr: Callable[[str], str | None] = lambda _: None,
    template: str = "",
) -> Found:
    """Return an address of `host` that the other nodes of the job can reach.

    Try the name that the template makes, then `host`, then the address that Slurm has for the node. All nodes get the
    same result if all of them can resolve the same names. Raise WorldError if no address is found.

    nodes: the number of nodes in the job.
    node_addr: a function that returns the address that Slurm has for a node (NodeAddr). Called only if no name
        resolves.
    """
    renamed = rename_host(host, template) if template else host
    made = f" (which cluster.host_template {template!r} makes of {host})" if renamed != host else ""
    reason = note = ""
    for name in dict.fromkeys((renamed, host)):
        if _is_address(name):
            return Found(name, note)  # even a loopback address: the local engine's nodes have, for example, 127.0.0.2
        try:
            return Found(pick_address(name, resolver(name), nodes), note)
        except OSError as error:
            why = error.strerror or error
            problem = f"{name}{made if name == renamed else ''} does not resolve on {socket.gethostname()}: {why}"
            reason = f"{reason}; {problem}" if reason else problem
            note = f"{reason}; hpcinit uses {host} instead: fix cluster.host_template, or remove it"
    address = node_addr(host)
    if not address or address == host:
        template = (
            "fix or remove cluster.host_template"
            if made
            else "set cluster.host_template if the nodes have other names in DNS"
        )
        raise WorldError(
            f"{reason}, and Slurm has no other address for it. Ask the site to add the node to DNS or /etc/hosts, or "
            f"{template}"
        )
    note = f"{reason}; using Slurm's address for it, {address}"
    try:
        return Found(pick_address(host, [address] if _is_address(address) else resolver(address), nodes), note)
    except OSError as error:
        raise WorldError(
            f"{reason}, and Slurm's address for it, {address}, does not work either: {error.strerror or error}; ask "
            "the site to add the node to DNS or /etc/hosts"
        ) from None


def pick_address(host: str, addresses: Sequence[str], nodes: int) -> str:
    """Return a host's first IPv4 address, or else its first IPv6 address. Skip loopback addresses.

    A single node may use a loopback address if it has no other. Raise WorldError if other nodes cannot connect to any
    of the addresses.
    """
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in addresses]
    usable = [ip for ip in parsed if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)]
    if not usable and nodes == 1:
        usable = [ip for ip in parsed if ip.is_loopback]
    if not usable:
        raise WorldError(
            f"{host} resolves to {', '.join(addresses) or 'no address'} on {socket.gethostname()}, expected an address "
            f"that the other {nodes - 1} nodes can connect to. If a line in /etc/hosts on {socket.gethostname()} maps "
            "the name to the machine itself, remove the name from that line"
        )
    return str(min(usable, key=lambda ip: ip.version))


def in_url(host: str, port: int) -> str:
    """Return host and port for a URL, such as 'n1:20000', or '[fd00::1]:20000' for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def holding(address: str) -> str:
    """Return the name of the interface that has `address`, such as 'eth0'.

    If no interface has it, return ''.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, held in _own_addresses() if held == wanted), "")


def family(address: str) -> socket.AddressFamily:
    """Return the address family (IPv4 or IPv6) of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def towards(address: str) -> str:
    """Return which of this node's addresses the kernel would use to send to `address`, or '' if there is no route.

    Nothing is sent.
    """
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def default_address() -> str:
    """Return this node's address on its default route, or else its first usable address, or ''.

    Loopback and link-local addresses are not usable. To find the default route, ask the kernel for the route to an
    address that is reserved for documentation. Nothing is sent.
    """
    for elsewhere in ("192.0.2.1", "2001:db8::1"):
        if found := towards(elsewhere):
            return found
    usable = [ip for _, ip in _own_addresses() if not (ip.is_loopback or ip.is_link_local)]
    return str(min(usable, key=lambda ip: ip.version)) if usable else ""


def blind_spot(name: str, resolver: Resolver = resolve) -> str:
    """Return why other nodes cannot reach the address at which gloo would listen, or '' if they can.

    gloo uses the first address of this node's own name that it can bind, or else loopback (torch,
    GlooDeviceFactory.cpp).
    """
    try:
        bound = first_of_ours(resolver(name))
    except OSError as error:
        return f"{name} does not resolve on {name} itself ({error.strerror or error})"
    if not bound:
        return f"{name} does not resolve to an address of this node on {name} itself"
    return f"{name} is {bound} on {name} itself" if ipaddress.ip_address(bound).is_loopback else ""


def first_of_ours(addresses: Sequence[str]) -> str:
    """Return the first of `addresses` that is an address of this node, or ''."""
    for address in addresses:
        with socket.socket(family(address), socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError:
                continue
            return address.partition("%")[0]
    return ""


def _own_addresses() -> list[tuple[str, IPAddress]]:
    """Return this node's addresses, each with the name of its interface, without labels such as ':1' in 'eth0:1'."""
    import psutil  # noqa: PLC0415 - needed only if the nodes' names do not resolve everywhere

    return [
        (name.partition(":")[0], ipaddress.ip_address(one.address.partition("%")[0]))
        for name, found in psutil.net_if_addrs().items()
        for one in found
        if one.family in {socket.AF_INET, socket.AF_INET6}
    ]
