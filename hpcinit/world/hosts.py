"""From a node's name to an address that every node can reach.

For example, the template '{host}i' makes jwb0001i of jwb0001, for a cluster whose fast network has separate names.
A plain suffix is added to the first label: 'i' makes n1i.site of n1.site. Two kinds of address are never used:

- 127.0.1.1: Debian's installer maps a machine's own name to it, and no other node can connect to it.
- fe80::1 (link-local): it means a different machine on each interface.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hpcinit.base.errors import ConfigError, WorldError

Resolver = Callable[[str], Sequence[str]]  # returns a name's addresses; raises OSError if there are none
PLACEHOLDER = "{host}"
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
# SLURM_NODE_ALIASES "ec0:10.0.0.7:host-7,ec1:[fd00::8]:host-8": node, NodeAddr, NodeHostName
_ALIAS = re.compile(r"([^:,]+):(\[[^]]*\]|[^:,\[\]]*):([^:,]*)")


class Found(NamedTuple):
    """An address, and a note about how it was found, or ''."""

    address: str
    note: str = ""


def rename(host: str, template: str) -> str:
    """Return `host` on the network that `template` describes: '{host}-ib0', or a plain suffix; '' changes nothing.

    Raise ConfigError if the template has another placeholder than one {host}. Raise WorldError if the result is not a
    host name.
    """
    rest = template.replace(PLACEHOLDER, "", 1)
    if "{" in rest or "}" in rest:
        raise ConfigError(
            f"the host template {template!r} cannot be read, expected {PLACEHOLDER} once and no other braces, as in "
            "'{host}-ib0', or a plain suffix"
        )
    if PLACEHOLDER in template:
        name = template.replace(PLACEHOLDER, host)
    else:
        label, dot, domain = host.partition(".")
        name = host if _is_address(host) else f"{label}{template}{dot}{domain}"
    if not (_is_address(name) or (_NAME.fullmatch(name) and len(name) <= 255)):
        raise WorldError(
            f"the host template {template!r} makes {name!r} of the node {host!r}, which is not a host name: expected "
            "letters, digits, '-' and '.'"
        )
    return name


def resolve(host: str) -> Sequence[str]:
    """Return the addresses of a name, in the system's order. Raise OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def find(
    host: str,
    nodes: int,
    resolver: Resolver = resolve,
    node_addr: Callable[[str], str | None] = lambda _: None,
    own: Collection[str] = (),
    template: str = "",
) -> Found:
    """Return an address of `host` for a job on `nodes` nodes: of its name by the template, else of `host`, else
    Slurm's.

    All nodes get the same result, unless some can resolve names that others cannot.
    node_addr: returns Slurm's address of the node (NodeAddr); called only if no name resolves.
    own: addresses of this machine's interfaces, if it is that host. Raise WorldError.
    """
    renamed = rename(host, template) if template else host
    made = f" (which cluster.host_template {template!r} makes of {host})" if renamed != host else ""
    reason = note = ""
    for name in dict.fromkeys((renamed, host)):
        if _is_address(name):
            return Found(name, note)  # 127.0.0.2 is valid too: a node of the local engine
        try:
            return Found(pick(name, resolver(name), nodes, own), note)
        except OSError as error:
            why = error.strerror or error
            problem = f"{name}{made if name == renamed else ''} does not resolve on {socket.gethostname()}: {why}"
            reason = f"{reason}; {problem}" if reason else problem
            note = f"{reason}; {host} is used unchanged: fix cluster.host_template, or remove it"
    return _as_slurm_says(host, nodes, resolver, node_addr, own, reason, bool(made))


def _as_slurm_says(
    host: str,
    nodes: int,
    resolver: Resolver,
    node_addr: Callable[[str], str | None],
    own: Collection[str],
    reason: str,
    renamed: bool,
) -> Found:
    address = node_addr(host)
    if not address or address == host:
        template = (
            "fix cluster.host_template, or remove it"
            if renamed
            else "or give the cluster a host template if its nodes have other names"
        )
        raise WorldError(
            f"{reason}, and Slurm has no other address for it; expected a name that every node can look up: ask the "
            f"site to add the node to DNS or /etc/hosts, {template}"
        )
    note = f"{reason}; using Slurm's address for it, {address}"
    try:
        return Found(pick(host, [address] if _is_address(address) else resolver(address), nodes, own), note)
    except OSError as error:
        raise WorldError(
            f"{reason}, and Slurm's address for it, {address}, does not work either: {error.strerror or error}; ask "
            "the site to add the node to DNS or /etc/hosts"
        ) from None


def pick(host: str, addresses: Sequence[str], nodes: int, own: Collection[str] = ()) -> str:
    """Return one of a name's addresses: no loopback, those of `own` first, IPv4 before IPv6, else in the given order.

    Raise WorldError if no other node could connect to any of them.
    """
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in addresses]
    usable = [ip for ip in parsed if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)]
    if not usable and nodes == 1:
        usable = [ip for ip in parsed if ip.is_loopback]
    if not usable:
        raise WorldError(
            f"{host} is {', '.join(addresses) or 'no address'} on {socket.gethostname()}, expected an address that the "
            f"other {nodes - 1} nodes can connect to: a line of /etc/hosts on {socket.gethostname()} maps the name to "
            "the machine itself; remove the name from that line"
        )
    mine = {ipaddress.ip_address(text.partition("%")[0]) for text in own}
    return str(min(usable, key=lambda ip: (ip not in mine if mine else False, ip.version)))


def in_url(host: str, port: int) -> str:
    """Return 'n1:20000', or '[fd00::1]:20000' for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_aliases(text: str) -> dict[str, str]:
    """Return the address of each node in SLURM_NODE_ALIASES, which Slurm sets for nodes whose names may not resolve.

    '(null)' is an empty list. Raise WorldError for text that Slurm would not have written.
    """
    if text in {"", "(null)"}:
        return {}
    found: dict[str, str] = {}
    at = 0
    while at <= len(text):
        alias = _ALIAS.match(text, at)
        if not alias or text[alias.end() : alias.end() + 1] not in {"", ","}:
            raise WorldError(
                f"SLURM_NODE_ALIASES cannot be read at column {at + 1}: {text[at : at + 40]!r}, expected "
                "NODE:ADDRESS:HOSTNAME,..."
            )
        found[alias[1]] = alias[2].strip("[]")
        at = alias.end() + 1
    return {node: address for node, address in found.items() if address}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
