"""From a node's name to an address that every node can reach.

{host}i         jwb0001 -> jwb0001i             a cluster whose fast network has names of its own
{host}-ib0      n1      -> n1-ib0
i               n1.site -> n1i.site             a plain suffix goes to the first label
127.0.1.1       what Debian's installer writes beside a machine's own name: no other node can connect to it
fe80::1         link-local: means another machine on each interface
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hpcinit.base.errors import ConfigError, WorldError

Resolver = Callable[[str], Sequence[str]]  # a name's addresses; raises OSError where there are none
PLACEHOLDER = "{host}"
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
# SLURM_NODE_ALIASES "ec0:10.0.0.7:host-7,ec1:[fd00::8]:host-8": node, NodeAddr, NodeHostName
_ALIAS = re.compile(r"([^:,]+):(\[[^]]*\]|[^:,\[\]]*):([^:,]*)")


class Found(NamedTuple):
    """An address, and what there is to say about how it was found ('' if nothing)."""

    address: str
    note: str = ""


def rename(host: str, template: str) -> str:
    """`host` on the network that `template` describes: '{host}-ib0', or a plain suffix; '' changes nothing.

    Raises ConfigError unless the template has at most one placeholder, and that is {host}; WorldError unless a host
    name comes out of it.
    """
    rest = template.replace(PLACEHOLDER, "", 1)
    if "{" in rest or "}" in rest:
        raise ConfigError(
            f"the host template {template!r} is not understood, expected {PLACEHOLDER} once and no other braces, as in "
            "'{host}-ib0', or a plain suffix"
        )
    if PLACEHOLDER in template:
        name = template.replace(PLACEHOLDER, host)
    else:
        label, dot, domain = host.partition(".")
        name = host if _is_address(host) else f"{label}{template}{dot}{domain}"
    if not (_is_address(name) or (_NAME.fullmatch(name) and len(name) <= 255)):
        raise WorldError(
            f"the host template {template!r} makes {name!r} of the node {host!r}, which is no host name: expected "
            "letters, digits, '-' and '.'"
        )
    return name


def resolve(host: str) -> Sequence[str]:
    """The addresses of a name, in the system's order. Raises OSError."""
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
    """The address of `host` for a job on `nodes` nodes: of its name by the template, else of its own, else Slurm's.

    All nodes go the same way, unless some can look up what others cannot.
    node_addr: what Slurm says the node's address is (NodeAddr), asked for only where no name resolves.
    own: addresses of this machine's interfaces, if it is the host in question. Raises WorldError.
    """
    renamed = rename(host, template) if template else host
    made = f" (which cluster.host_template {template!r} makes of {host})" if renamed != host else ""
    reason = note = ""
    for name in dict.fromkeys((renamed, host)):
        if _is_address(name):
            return Found(name, note)  # 127.0.0.2 too: a node of the local engine
        try:
            return Found(pick(name, resolver(name), nodes, own), note)
        except OSError as error:
            why = error.strerror or error
            said = f"{name}{made if name == renamed else ''} does not resolve on {socket.gethostname()}: {why}"
            reason = f"{reason}; {said}" if reason else said
            note = f"{reason}; {host} is used as it is: mend the template, or leave it out"
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
            "mend cluster.host_template, or leave it out"
            if renamed
            else "or give the cluster a host template if its nodes have other names"
        )
        raise WorldError(
            f"{reason}, and Slurm has no other address for it; expected a name that every node can look up: have the "
            f"node added to DNS or /etc/hosts, {template}"
        )
    note = f"{reason}; Slurm's address for it is used, {address}"
    try:
        return Found(pick(host, [address] if _is_address(address) else resolver(address), nodes, own), note)
    except OSError as error:
        raise WorldError(
            f"{reason}, and neither does Slurm's address for it, {address}: {error.strerror or error}; have the node "
            "added to DNS or /etc/hosts"
        ) from None


def pick(host: str, addresses: Sequence[str], nodes: int, own: Collection[str] = ()) -> str:
    """One of a name's addresses: no loopback, IPv4 before IPv6, those of `own` first; else in the order given.

    Raises WorldError if no other node could connect to any of them.
    """
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in addresses]
    usable = [ip for ip in parsed if not (ip.is_loopback or ip.is_link_local or ip.is_unspecified)]
    if not usable and nodes == 1:
        usable = [ip for ip in parsed if ip.is_loopback]
    if not usable:
        raise WorldError(
            f"{host} is {', '.join(addresses) or 'no address'} on {socket.gethostname()}, expected an address that the "
            f"other {nodes - 1} nodes can connect to: a line of /etc/hosts on {socket.gethostname()} maps the name to "
            "the machine itself; take the name off that line"
        )
    mine = {ipaddress.ip_address(text.partition("%")[0]) for text in own}
    return str(min(usable, key=lambda ip: (ip not in mine if mine else False, ip.version)))


def in_url(host: str, port: int) -> str:
    """'n1:20000', and '[fd00::1]:20000' for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_aliases(text: str) -> dict[str, str]:
    """The address of each node from SLURM_NODE_ALIASES, which Slurm sets for nodes whose names may not resolve.

    '(null)' is an empty list. Raises WorldError for text that Slurm would not have written.
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
