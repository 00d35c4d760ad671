"""Names of nodes and their addresses."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence

import pytest

from hpcinit.base.errors import ConfigError, WorldError
from hpcinit.world import network

HERE = socket.gethostname()


def resolver(table: Mapping[str, Sequence[str]]) -> network.Resolver:
    """Return a resolver for this table instead of DNS."""

    def resolve(host: str) -> Sequence[str]:
        if host not in table:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return table[host]

    return resolve


@pytest.mark.parametrize(
    ("host", "template", "name"),
    [
        ("n1", "", "n1"),
        ("jwb0001", "{host}i", "jwb0001i"),
        ("n1", "{host}-ib0", "n1-ib0"),
        ("n1", "ib-{host}.fabric", "ib-n1.fabric"),
        ("n1", "i", "n1i"),
        ("n1", "-ib0", "n1-ib0"),
        ("n1.site.org", "i", "n1i.site.org"),
        ("127.0.0.2", "i", "127.0.0.2"),
    ],
)
def test_rename(host: str, template: str, name: str) -> None:
    """A template replaces {host}, and a plain suffix is added to the first label."""
    assert network.rename_host(host, template) == name


@pytest.mark.parametrize("template", ["{host}{host}", "{node}i", "{host", "host}", "{host}{}", "{0}"])
def test_a_template_with_other_braces(template: str) -> None:
    """Any other placeholder than one {host} is an error that shows the template and the correct form."""
    with pytest.raises(ConfigError) as caught:
        network.rename_host("n1", template)
    assert str(caught.value) == (
        f"the host template {template!r} is invalid, expected {{host}} once and no other braces, as in "
        "'{host}-ib0', or a plain suffix"
    )


@pytest.mark.parametrize("template", ["{host} i", "-{host}", "{host}.", "$(x)", "{host}-", "{host}..ib", "i" * 255])
def test_a_template_that_makes_no_name(template: str) -> None:
    """The result must be a host name; a trailing dot is allowed."""
    if template == "{host}.":
        assert network.rename_host("n1", template) == "n1."
        return
    with pytest.raises(
        WorldError, match="from the node name 'n1', but that is not a host name: expected letters, digits"
    ):
        network.rename_host("n1", template)


@pytest.mark.parametrize(
    ("addresses", "nodes", "chosen"),
    [
        (["10.0.0.1"], 4, "10.0.0.1"),
        (["127.0.1.1", "10.0.0.1"], 4, "10.0.0.1"),
        (["fd00::1", "10.0.0.1"], 4, "10.0.0.1"),
        (["fd00::1"], 4, "fd00::1"),
        (["::1", "fe80::1%eth0", "fd00::1"], 4, "fd00::1"),
        (["10.0.0.1", "192.168.0.1"], 4, "10.0.0.1"),
        (["127.0.1.1"], 1, "127.0.1.1"),
        (["::1"], 1, "::1"),
    ],
)
def test_pick(addresses: list[str], nodes: int, chosen: str) -> None:
    """With several nodes no loopback is used, and IPv4 is preferred to IPv6."""
    assert network.pick_address("n1", addresses, nodes) == chosen


@pytest.mark.parametrize(
    "addresses", [["127.0.1.1"], ["127.0.0.1"], ["127.0.1.1", "::1"], ["fe80::1%eth0"], ["0.0.0.0"], []]
)
def test_an_address_that_no_other_node_reaches(addresses: list[str]) -> None:
    """127.0.1.1 on a job of several nodes is an error that names the file at fault."""
    with pytest.raises(WorldError) as caught:
        network.pick_address("n1", addresses, 4)
    assert str(caught.value) == (
        f"n1 resolves to {', '.join(addresses) or 'no address'} on {HERE}, expected an address that the other 3 nodes can "
        f"connect to. If a line in /etc/hosts on {HERE} maps the name to the machine itself, remove the name from that line"
    )


def test_a_name_that_resolves_needs_no_slurm() -> None:
    """Slurm is not queried if the name resolves."""
    assert network.find_address("n1", 2, resolver({"n1": ["10.0.0.1"]}), node_addr=lambda _: pytest.fail()) == (
        "10.0.0.1",
        "",
    )


def test_an_address_needs_no_dns() -> None:
    """A host that is an address is used unchanged, including the local engine's loopback nodes."""
    assert network.find_address("10.0.0.1", 2, resolver({})).address == "10.0.0.1"
    assert network.find_address("127.0.0.2", 2, resolver({})).address == "127.0.0.2"


@pytest.mark.parametrize(("addr", "address"), [("10.0.0.9", "10.0.0.9"), ("other", "10.0.0.8")])
def test_a_name_that_does_not_resolve_falls_back_to_slurm(addr: str, address: str) -> None:
    """Slurm's address of the node, a name or an address, is used with a note."""
    found = network.find_address("n1", 2, resolver({"other": ["10.0.0.8"]}), node_addr=lambda host: {"n1": addr}[host])
    assert found.address == address
    assert found.note == (
        f"n1 does not resolve on {HERE}: Name or service not known; using Slurm's address for it, {addr}"
    )


@pytest.mark.parametrize("addr", [None, "", "n1"])
def test_a_name_without_any_address(addr: str | None) -> None:
    """If Slurm has no address either, the message names the host, the node that looked it up and the fix."""
    with pytest.raises(WorldError) as caught:
        network.find_address("n1", 2, resolver({}), node_addr=lambda _: addr)
    assert str(caught.value) == (
        f"n1 does not resolve on {HERE}: Name or service not known, and Slurm has no other address for it. Ask the "
        "site to add the node to DNS or /etc/hosts, or set cluster.host_template if the nodes have other names in DNS"
    )


OFF = f"n1-ib0 (which cluster.host_template '{{host}}-ib0' makes of n1) does not resolve on {HERE}: Name or service not known"


def with_template(table: Mapping[str, Sequence[str]], addr: str | None) -> network.Found:
    return network.find_address("n1", 2, resolver(table), lambda host: {"n1": addr}[host], template="{host}-ib0")


def test_a_template_that_holds() -> None:
    """The node's name on the fast network is used without a note."""
    assert with_template({"n1": ["10.0.0.1"], "n1-ib0": ["10.1.0.1"]}, None) == ("10.1.0.1", "")


def test_a_template_whose_names_do_not_resolve() -> None:
    """The node's plain name is used, then Slurm's address, with a one-line note about the template."""
    found = with_template({"n1": ["10.0.0.1"]}, "10.0.0.9")
    assert found == ("10.0.0.1", f"{OFF}; hpcinit uses n1 instead: fix cluster.host_template, or remove it")
    plain = f"n1 does not resolve on {HERE}: Name or service not known"
    assert with_template({}, "10.0.0.9") == ("10.0.0.9", f"{OFF}; {plain}; using Slurm's address for it, 10.0.0.9")
    with pytest.raises(WorldError) as caught:
        with_template({}, None)
    assert str(caught.value) == (
        f"{OFF}; {plain}, and Slurm has no other address for it. Ask the site to add the node to DNS or "
        "/etc/hosts, or fix or remove cluster.host_template"
    )


def test_a_template_on_nodes_that_are_addresses() -> None:
    """The local engine's node names are addresses, which a template does not change."""
    found = network.find_address("127.0.0.2", 2, resolver({}), template="{host}-ib0")
    assert found.address == "127.0.0.2" and "127.0.0.2-ib0 (which cluster.host_template" in found.note


def test_slurms_name_for_it_does_not_resolve_either() -> None:
    """Both names are in the message."""
    with pytest.raises(
        WorldError, match=r"n1 does not .*, and Slurm's address for it, n1x, does not work either: Name or"
    ):
        network.find_address("n1", 2, resolver({}), node_addr=lambda _: "n1x")


def test_an_error_without_text() -> None:
    """An OSError without a text is shown by its number."""

    def broken(host: str) -> Sequence[str]:
        raise OSError(errno.EIO)

    with pytest.raises(WorldError, match=rf"n1 does not resolve on {HERE}: {errno.EIO}, and Slurm"):
        network.find_address("n1", 2, broken)


def test_the_systems_own_resolver() -> None:
    """localhost resolves to loopback addresses, without duplicates."""
    found = network.resolve("localhost")
    assert set(found) <= {"127.0.0.1", "::1"} and len(found) == len(set(found)) > 0
    assert network.find_address("localhost", 1).address in found


def test_in_url() -> None:
    """An IPv6 address gets brackets."""
    assert network.in_url("n1", 20000) == "n1:20000"
    assert network.in_url("10.0.0.1", 20000) == "10.0.0.1:20000"
    assert network.in_url("fd00::1", 20000) == "[fd00::1]:20000"


# --- this node's own addresses


def test_which_interface_has_an_address() -> None:
    """The loopback interface has its two addresses, and an unused address has no interface."""
    assert [network.holding(ip) for ip in ("127.0.0.1", "::1", "192.0.2.254", "2001:db8::1")] == ["lo", "lo", "", ""]


def test_the_address_on_the_way_to_another() -> None:
    """The kernel's source address is returned without sending a packet; '' without a route."""
    assert (network.towards("127.0.0.9"), network.towards("::1")) == ("127.0.0.1", "::1")
    assert network.towards("255.255.255.255") == ""


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"n1": ["127.0.0.1"]}, "n1 is 127.0.0.1 on n1 itself"),
        ({"n1": ["192.0.2.254", "::1"]}, "n1 is ::1 on n1 itself"),
        ({"n1": ["192.0.2.254"]}, "n1 does not resolve to an address of this node on n1 itself"),
        ({}, "n1 does not resolve on n1 itself (Name or service not known)"),
    ],
)
def test_a_node_that_does_not_know_itself(table: dict[str, list[str]], said: str) -> None:
    """The first of the node's own addresses that can be bound decides, as in gloo."""
    assert network.blind_spot("n1", resolver(table)) == said


def test_a_node_that_knows_itself() -> None:
    """A name with an address of this machine that is not loopback is valid (needs such an address)."""
    own = [str(ip) for _, ip in network._own_addresses() if ip.version == 4 and not ip.is_loopback]
    if not own:
        pytest.skip("this machine has no IPv4 address but loopback")
    assert network.blind_spot("n1", resolver({"n1": ["192.0.2.254", own[0]]})) == ""
