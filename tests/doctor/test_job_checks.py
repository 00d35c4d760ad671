"""The doctor's checks of its ranks' reports: recorded on a real cluster, and stand-ins for GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpcinit.doctor import link_diagnosis, node_diagnosis
from hpcinit.node import node_findings, node_probe, nvidia_smi
from hpcinit.records import rank_report
from hpcinit.records.check_results import FAIL, OK, WARNING, Check
from hpcinit.records.node_facts import Gpu, GpuProcess, Interface, Name, Node, Place
from hpcinit.records.rank_report import AllReduce, Copies, Link, Pair, Report, Rule
from hpcinit.records.run_folder import from_known_fields

DATA = Path(__file__).parent.parent / "data/doctor/two-nodes.json"
H100 = "NVIDIA H100 80GB HBM3"


def recorded() -> list[Report]:
    return [from_known_fields(Report, one) for one in json.loads(DATA.read_text())["reports"]]


def judged(reports: Sequence[Report], nodes: int = 2, ranks_per_node: int = 2) -> list[Check]:
    return [*node_diagnosis.check_nodes(reports, nodes, ranks_per_node), *link_diagnosis.check_links(reports)]


def of(about: str, found: Sequence[Check]) -> Check:
    [one] = [check for check in found if check.about == about]
    return one


def gpus(nodes: int = 4, **changes: Any) -> list[Report]:
    """Return a STAND-IN for hardware that the tests do not have: nodes g1, g2, ... of two H100 each, all links alike."""
    hosts = tuple(f"g{number + 1}" for number in range(nodes))
    ranks = [(2 * node, 2 * node + 1) for node in range(nodes)]
    links: dict[int, list[Link]] = {}
    for a, b, between in rank_report.links_of_phase(ranks):
        trip, speed = (15e-6, 45.0) if between else (8e-6, 380.0)
        links.setdefault(a, []).append(Link(a, b, between, (trip,) * 3, (speed,) * 3, 0.0, trip / 2))
    ports = (Interface("mlx5_0:1", True, 400, True), Interface("mlx5_1:1", True, 400, True))
    node = Node(1000, 900, "6.8", (Place("shared memory", "/dev/shm", 500, 500),), ports)
    return [
        Report(
            rank, rank % 2, 2 * nodes, 2, hosts[rank // 2], "7.0.0", rank_report.MEASURED, hosts if rank % 2 == 0 else (),
            {"device": f"cuda:{rank % 2}", "name": H100, "uuid": f"GPU-{rank}", "memory_gb": "85"},
            ("CUDA_VISIBLE_DEVICES=0,1",), "nvidia 580.65.06", str(rank % 2), 52, {"torch": "2.13.0+cu128"}, "nccl",
            node if rank % 2 == 0 else None, 50e-6, (1.6e-3,) * 3, tuple(links.get(rank, ())),
            (AllReduce(1 << 28, 6e-3, 2 * nodes),) if rank == 0 else (),
            AllReduce(1 << 28, 7e-4, 2) if rank % 2 == 0 else None,
        )
        for rank in range(2 * nodes)
    ]  # fmt: skip


def slowed(reports: Sequence[Report], host: str, **times: Any) -> list[Report]:
    """Return the reports with these times for each link between `host` and another node."""
    ranks = {report.rank for report in reports if report.host == host}

    def changed_link(link: Link) -> Link:
        return replace(link, **times) if link.between_nodes and ranks & {link.a, link.b} else link

    return [replace(report, links=tuple(map(changed_link, report.links))) for report in reports]


def test_a_report_is_read_as_written(tmp_path: Path) -> None:
    """A report is read as written, also with keys of a newer version; half a file and other JSON are skipped."""
    for report in gpus(2):
        rank_report.write(tmp_path, report)
    (tmp_path / "doctor/rank-9.json").write_text('{"rank": 9')
    (tmp_path / "doctor/rank-8.json").write_text('{"rank": 8}')
    assert rank_report.read(tmp_path) == gpus(2)
    assert from_known_fields(Report, {**json.loads(json.dumps(asdict(gpus(2)[0]))), "of_tomorrow": 1}) == gpus(2)[0]


def test_a_healthy_cluster() -> None:
    """Recorded reports give one warning only: Slurm lists GPUs that torch does not find."""
    found = judged(recorded())
    assert [check.about for check in found if check.status != OK] == ["devices"]
    assert of("devices", found).detail == (
        "torch 2.13.0+cpu finds no GPU on ranks 0-3, although SLURM_STEP_GPUS lists some"
    )
    assert of("ranks", found).detail == "4 on 2 nodes connected and finished all measurements"


def test_healthy_gpus() -> None:
    """Reports of healthy GPUs give no warning."""
    found = judged(gpus(), 4)
    assert {check.status for check in found} == {OK}
    assert of("devices", found).detail == f"8 x {H100}"
    assert of("all-reduce", found).detail == ("256 MiB over 8 ranks at 78.29 GB/s bus bandwidth")


def test_the_same_device_twice() -> None:
    """The same device twice fails on one host only: two hosts may have the same UUID (MIG, a copied image)."""
    reports = gpus()
    reports[3] = replace(reports[3], device=reports[2].device)
    found = of("devices", judged(reports, 4))
    assert found.status == FAIL and found.detail == "g2: ranks 2-3 use the same device, GPU-2"
    reports[3] = replace(gpus()[3], device=reports[0].device)
    assert of("devices", judged(reports, 4)).status == OK


def test_ranks_that_did_not_start() -> None:
    """A node without any report is faulty; a single rank is only named; without any report no node is faulty."""
    reports = [report for report in gpus() if report.host != "g3" and report.rank != 7]
    found = [check for check in judged(reports, 4) if check.about == "ranks"]
    assert [(check.detail, check.hosts) for check in found] == [
        ("g3: ranks 4-5 did not start (no rank of the node did)", ("g3",)),
        ("g4: rank 7 did not start", ()),
    ]
    found = judged([], 2)
    assert [(check.detail, check.hosts) for check in found] == [
        ("ranks 0-1 did not start (no rank of the node did)", ()),
        ("ranks 2-3 did not start (no rank of the node did)", ()),
    ]  # and no check of devices
    stuck = [replace(report, stage="begun", links=(), all_reduce=()) for report in recorded()]
    assert of("ranks", judged(stuck)).detail == "ranks 0-3 stopped at stage 'begun'"


@pytest.mark.parametrize("times", [{"round_trip_s": (2e-3,) * 3}, {"gb_s": (9.0,) * 3}])
def test_a_slow_node_is_named(times: dict[str, tuple[float, ...]]) -> None:
    """A node with slow links is named, of four nodes and of three; its neighbors share the links and are not named."""
    for nodes in (3, 4):
        found = of("network", judged(slowed(gpus(nodes), "g2", **times), nodes))
        assert (found.status, found.hosts) == (FAIL, ("g2",)) and found.detail.startswith("g2: its best link"), found


def test_a_slow_link_is_named() -> None:
    """A slow link between two nodes that have good links to others is named, and no node is faulty."""
    reports = gpus()

    def slow_link(link: Link) -> Link:
        return replace(link, gb_s=(5.0,) * 3) if {link.a, link.b} == {2, 4} else link

    reports = [replace(report, links=tuple(map(slow_link, report.links))) for report in reports]
    found = of("network", judged(reports, 4))
    assert (found.status, found.hosts) == (WARNING, ())
    assert "g2 - g3 (ranks 2 and 4) is slow: bandwidth 5 GB/s" in found.detail


def test_of_two_nodes_neither_is_named() -> None:
    """With two nodes a slow link fails the check, but no node is faulty; the advice is a third node."""
    found = of("network", judged(slowed(recorded(), "n2", round_trip_s=(0.02,) * 3)))
    assert (found.status, found.hosts) == (FAIL, ()) and found.advice.startswith("repeat with nodes=3")
    assert "n1 - n2 (ranks 0 and 2) is slow: round trip 20.0 ms" in found.detail


def test_slow_in_one_round() -> None:
    """A link that is slow in one round of three is not reported: other processes cause that."""
    assert of("network", judged(slowed(gpus(), "g2", gb_s=(5.0, 45.0, 45.0)), 4)).status == OK


def test_inside_of_a_node() -> None:
    """A slow link between two GPUs, a slow GPU and a slow all-reduce on a node are reported with the node."""
    reports = gpus()
    [own, other] = reports[4].links
    reports[4] = replace(reports[4], links=(replace(own, gb_s=(20.0,) * 3), other), matmul_s=(4e-3,) * 3)
    found = judged(reports, 4)
    inside = of("inside nodes", found)
    assert inside.hosts == ("g3",) and "the link between ranks 4 and 5 is slow" in inside.detail
    assert of("devices' speed", found).detail == (
        "g3: the device of rank 4 is slow: a matrix product takes 4.0 ms, but 1.6 ms on the fastest device"
    )
    reports[4] = replace(gpus()[4], on_node=AllReduce(1 << 28, 5e-3, 2))
    assert of("all-reduce inside nodes", judged(reports, 4)).hosts == ("g3",)


def test_all_reduce_of_all_ranks() -> None:
    """The check shows the bus bandwidth of the largest size."""
    found = of("all-reduce", judged(gpus(), 4))
    assert found.status == OK and found.detail.endswith(" GB/s bus bandwidth")
    assert AllReduce(4 * 10**9, 1.0, 4).bus_gb_s == 6.0  # 2 * 3/4 * 4 GB in a second


def test_clocks() -> None:
    """Each node's clock is compared with rank 0's over the links; skew within a message's time is not reported."""
    reports = [
        replace(report, links=tuple(replace(link, ahead_s=-40.0) if link.a == 2 else link for link in report.links))
        for report in gpus()
    ]
    found = [check for check in judged(reports, 4) if check.about == "clocks"]
    assert [(check.status, check.detail) for check in found] == [
        (WARNING, "g3: the clock is 40.0 s behind, compared with rank 0's node")
    ]


def test_differences() -> None:
    """A node with another driver than most nodes is named once."""
    reports = [replace(one, driver="nvidia 535.1") if one.host == "g4" else one for one in gpus()]
    found = of("driver", judged(reports, 4))
    assert (found.status, found.detail) == (WARNING, "g4: nvidia 535.1; most have nvidia 580.65.06")


def changed(reports: list[Report], **node: Any) -> list[Check]:
    """Return the checks of two nodes, of which the second has these values."""
    other = reports[2].node
    assert other
    reports[2] = replace(reports[2], node=replace(other, **node))
    return judged(reports)


def test_missing_resources_of_a_node() -> None:
    """Little shared memory, disk or memory, and a port that is down, are reported with the node."""
    full = Place("shared memory", "/dev/shm", 0.0, 11.8, "No space left on device")
    [found] = [check for check in changed(recorded(), places=(full,)) if check.status == FAIL]
    assert (found.about, found.hosts) == ("shared memory", ("n2",))
    assert found.detail == "n2: /dev/shm, not writable: No space left on device, 0.00 GB free of 11.80 GB"
    [little] = [c for c in changed(recorded(), places=(Place("TMPDIR", "/tmp", 0.5, 9),)) if c.status == WARNING][1:]
    assert little.detail == "n2: /tmp, 0.50 GB free of 9.00 GB"
    found = of("memory", changed(recorded(), available_gb=1.0))
    assert found.detail == "n2: only 1.0 GB of 24 GB is available before the program starts"
    reports = gpus(3)
    assert reports[2].node
    ports = (Interface("mlx5_0:1", True, 400, True), Interface("mlx5_1:1", False, 0, True))
    reports[2] = replace(reports[2], node=replace(reports[2].node, interfaces=ports))
    assert of("interfaces", judged(reports, 3)).detail == "g2: mlx5_1:1 is down, but up on most nodes"


def test_names() -> None:
    """A name that does not resolve fails; a node that is loopback to itself and an address of two names are warnings."""
    lost = Name("n1", error="Name or service not known")
    found = of("names", changed(recorded(), names=(lost,)))
    assert (found.status, found.detail) == (FAIL, "n2 cannot resolve n1: Name or service not known")
    own = Name("n2", ("127.0.1.1",), "n2")
    assert of("names", changed(recorded(), names=(own,))).detail == "n2 resolves its own name to 127.0.1.1"
    stale = (Name("n1", ("10.0.0.2",), "n2.site"), Name("n2", ("10.0.0.2",), "n2.site"))
    assert of("names", changed(recorded(), names=stale)).detail == (
        "n2 resolves n1 to 10.0.0.2, and that address to n2.site"
    )


def test_a_slow_store() -> None:
    """A store that answers slowly is reported with the rank that waited."""
    reports = [replace(one, store_s=0.4) if one.rank == 3 else one for one in recorded()]
    assert of("store", judged(reports)).detail == "rank 0's store is slow: it answers rank 3 in 0.40 s"


def test_pairs() -> None:
    """Links form a ring in each node and a ring of nodes per local rank; no rank is in a phase twice."""
    assert rank_report.links_of_phase([[0, 1], [2, 3]]) == [
        Pair(0, 1, False),
        Pair(2, 3, False),
        Pair(0, 2, True),
        Pair(1, 3, True),
    ]
    assert rank_report.links_of_phase([[0]]) == []
    ranks = [list(range(node * 3, node * 3 + 3)) for node in range(5)]
    pairs = rank_report.links_of_phase(ranks)
    assert len(pairs) == 5 * 3 + 5 * 3
    phases = rank_report.measurement_phases(pairs)
    assert sorted(pair for phase in phases for pair in phase) == sorted(pairs) and len(phases) == 6
    for phase in phases:
        ends = [rank for pair in phase for rank in pair[:2]]
        assert len(ends) == len(set(ends)) and len({pair.between_nodes for pair in phase}) == 1


def test_the_rule() -> None:
    """A value is slow above the factor, the deviations and the least difference; two values are never compared."""
    rule = Rule(1.5, mads=3, least=0.5)
    assert rank_report.slow_links({"a": [1, 1], "b": [1, 1], "c": [9, 9]}, rule) == ["c"]
    assert rank_report.slow_links({"a": [1, 1], "b": [1, 1], "c": [9, 1]}, rule) == []
    assert rank_report.slow_links({"a": [1], "b": [1], "c": [1.4]}, rule) == []
    assert rank_report.slow_links({"a": [0.1], "b": [0.1], "c": [0.5]}, rule) == []  # five times, but below `least`
    assert rank_report.slow_links({"a": [1], "b": [2], "c": [3], "d": [4], "e": [5.6]}, rule) == []  # they all differ
    assert rank_report.slow_links({"a": [1], "b": [9]}, rule) == [] and rank_report.slow_links({}, rule) == []


def test_a_probe_of_this_machine(tmp_path: Path) -> None:
    """The probe reports this machine; of a large job's names it resolves some, with its own and the neighbors'."""
    env = {"TMPDIR": str(tmp_path), "SCRATCH": "/not/there"}
    found = node_probe.probe(env, "localhost", ["localhost", "no.such.name.invalid"], "gloo", 10)
    places = {place.what: place for place in found.places}
    assert found.memory_gb > found.available_gb > 0
    assert places["TMPDIR"].path == str(tmp_path) and not places["TMPDIR"].error and not list(tmp_path.iterdir())
    assert places["scratch"].error == "No such file or directory"
    assert found.names[0].addresses and not found.names[0].error and found.names[1].error
    names = [f"n{number}" for number in range(1000)]
    some = node_probe._some(names, "n500")
    assert len(some) <= node_probe.MOST_NAMES + 4 and {"n0", "n499", "n500", "n501"} <= set(some)


def test_ports_of_infiniband(tmp_path: Path) -> None:
    """Ports are read from STAND-IN files like /sys/class/infiniband (kernel: ABI/stable/sysfs-class-infiniband)."""
    for name, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "1: DOWN", "10 Gb/sec (4X SDR)"),
    ):
        place = tmp_path / name / "ports/1"
        place.mkdir(parents=True)
        (place / "state").write_text(f"{state}\n")
        (place / "rate").write_text(f"{rate}\n")
    assert list(node_probe._ports(tmp_path)) == [
        Interface("mlx5_0:1", True, 400, True),
        Interface("mlx5_1:1", False, 10, True),
    ]


# STAND-IN output of nvidia-smi --query-gpu and --query-compute-apps, csv,noheader,nounits: no GPU was available.
SMI = """\
GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, 00000000:3B:00.0, 3200, 81559, Enabled, 0, 345, 1980, 2619, 2619, 1, 5, 16, 16, 0x0000000000000001, [N/A], Disabled, None
GPU-11111111-d72c-4106-c12f-20bd9faed9f6, 00000000:5E:00.0, 4, 81559, [N/A], [N/A], 345, 1980, 2619, 2619, 1, 5, 8, 16, 0x0000000000000001, [N/A], [N/A], [N/A]
"""
SMI_PROCESSES = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, 4194305, 3190, /usr/bin/python3, old\n"


def test_nvidia_smi_is_read() -> None:
    """STAND-IN output is parsed: '[N/A]' is unknown, a process belongs to its GPU, and torch's UUID or PCI address
    finds the device."""
    one, other = nvidia_smi.parse(nvidia_smi.FIELDS, SMI, SMI_PROCESSES)
    assert (one.used_mb, one.ecc, one.ecc_errors, one.sm_max_mhz, one.pcie_gen_max, one.pcie_width) == (
        3200, "Enabled", 0, 1980, 5, 16,
    )  # fmt: skip
    assert (
        one.processes == (GpuProcess(2**22 + 1, "/usr/bin/python3, old", 3190.0, user="user unknown"),)
        and other.processes == ()
    )
    assert (other.ecc, other.ecc_errors, other.pcie_width) == ("", None, 8)
    assert node_findings.of_device((one, other), {"uuid": "11111111-d72c-4106-c12f-20bd9faed9f6"}) == other
    assert node_findings.of_device((one, other), {"pci": "0000:3b:00.0"}) == one
    assert node_findings.of_device((one, other), {"device": "cpu"}) is None
    assert nvidia_smi.parse(nvidia_smi.FIELDS, "No devices were found\n", "") == ()


def test_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the command, or if it fails, there are no GPUs to report."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi.query()[0] == ()
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '%s' '{SMI}'\nexit 9\n")
    command.chmod(0o755)
    assert nvidia_smi.query()[0] == ()
    command.write_text(
        f"#!/bin/sh\ncase $1 in *query-gpu*) printf '%s' '{SMI}';; *) printf '%s' '{SMI_PROCESSES}';; esac\n"
    )
    assert nvidia_smi.query()[0] == nvidia_smi.parse(nvidia_smi.FIELDS, SMI, SMI_PROCESSES)


def with_gpus(*gpus_: Gpu, copies: Sequence[Copies] = ()) -> list[Report]:
    """Return STAND-IN reports of one node with a rank on each of these GPUs, with pids 100, 101, ..."""
    reports = gpus(1)
    made = [
        replace(reports[rank % 2], rank=rank, pid=100 + rank, node=None, device={"uuid": gpu.uuid})
        for rank, gpu in enumerate(gpus_)
    ]
    made[0] = replace(made[0], node=Node(gpus=gpus_))
    return [replace(report, copies=one) for report, one in zip(made, copies, strict=True)] if copies else made


def results(reports: Sequence[Report], about: str) -> list[tuple[str, str]]:
    return [(check.status, check.detail) for check in judged(reports, 1) if check.about == about]


def test_another_process_on_a_gpu_is_named() -> None:
    """STAND-IN: a process that is not a rank of the job is named with its memory; memory in use without a process is
    reported too."""
    foreign = Gpu(
        "GPU-a",
        "",
        3200,
        81559,
        processes=(GpuProcess(4242, "python3", 3072.0, user="alice"), GpuProcess(101, "python3", 500.0)),
    )
    [(status, text)] = results(with_gpus(foreign, Gpu("GPU-b", used_mb=600)), "devices' memory")
    assert (status, text) == (
        WARNING, "g1: 3.0 of 79.6 GiB of GPU-a are in use by python3 (process 4242, alice)",
    )  # fmt: skip
    [(status, text)] = results(with_gpus(Gpu("GPU-a", "", 3072, 81559)), "devices' memory")
    assert text == "g1: 3.0 of 79.6 GiB of GPU-a are in use, but nvidia-smi lists no process"
    own = Gpu("GPU-a", used_mb=3072, processes=(GpuProcess(100, "python3", 3000.0),))
    assert results(with_gpus(own), "devices' memory") == []


def test_the_health_of_gpus() -> None:
    """STAND-IN: uncorrected ECC errors make a node faulty, missing PCIe lanes are a warning."""
    one, other = nvidia_smi.parse(nvidia_smi.FIELDS, SMI, "")
    assert results(with_gpus(one), "devices' health") == [(OK, "no fault on 1 GPU")]
    [(status, text)] = results(with_gpus(one, other), "devices' health")
    assert status == WARNING and text.startswith("g1: the PCIe link of GPU-11111111")
    assert text.endswith("uses 8 of 16 lanes")
    [check] = [c for c in judged(with_gpus(replace(one, ecc_errors=3.0)), 1, 1) if c.status == FAIL]
    assert check.hosts == ("g1",) and "had 3 uncorrected ECC errors" in check.detail


def test_the_speed_of_copies() -> None:
    """STAND-IN: a device that copies at less than half of the median is named with the direction."""
    fast, slow = Copies(50.0, 48.0, 1400.0), Copies(12.0, 48.0, 1400.0)
    gpu = Gpu("GPU-a")
    assert results(with_gpus(gpu, copies=[fast]), "devices' copies") == [
        (OK, "at least 50.0 GB/s to the device, 48.0 GB/s from it and 1,400 GB/s on it")
    ]
    assert results(with_gpus(gpu, gpu, gpu, copies=[fast, slow, fast]), "devices' copies") == [
        (WARNING, "g1: rank 1 copies to device at 12.0 GB/s, but the median device copies at 50.0 GB/s")
    ]


def test_a_report_with_a_gpu_is_read_as_written(tmp_path: Path) -> None:
    """The nested values of the GPU, its processes and the copies are read as written."""
    one = nvidia_smi.parse(nvidia_smi.FIELDS, SMI, SMI_PROCESSES)[0]
    [report] = with_gpus(one, copies=[Copies(50.0, 48.0, 1400.0)])
    rank_report.write(tmp_path, report)
    assert rank_report.read(tmp_path) == [report]
