"""Turns the facts about a node into findings, for `hpcinit doctor` and for the check before a start.

The functions do no input or output. The text of a finding does not contain the node's name, which the caller adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_interface

from hpcinit.records.check_results import FAIL, OK, SHARED_MEMORY, WARNING, Check
from hpcinit.records.node_facts import Gpu, GpuProcess, Nccl, Node, Place
from hpcinit.records.node_records import DEVICE_XIDS

Network = IPv4Network | IPv6Network
# DataLoader workers and NCCL use shared memory. Containers get 64 MB by default (docker --shm-size).
LEAST_SHARED_GB, LITTLE_GB = 0.0625, 1.0
FOREIGN_MB = 1024  # report other processes that use more of a GPU's memory than this; an idle driver uses less
OCCUPIED = 0.5  # if other processes use more than this part of a GPU's memory, training would not fit
RECENT_S = 24 * 3600.0  # older Xids are ignored, because the GPU may have been reset since
# Bits of NVML's clocks_event_reasons.active that mean heat or a faulty power supply. The bits of an idle GPU and of a
# power cap are normal. The bit of any hardware slowdown (0x8) is omitted, because a change of the power state sets it
# for a moment:
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
SLOWED = {0x20: "its temperature", 0x40: "its temperature (hardware slowdown)", 0x80: "the power supply (power brake)"}
CONTAINER_BRIDGES = ("docker", "virbr", "podman", "cni", "lxcbr", "lxdbr", "br-")
ASK_SITE = "report the node to the site"
MANY = 3  # with at least this many nodes, the majority is taken as right


def node_findings(node: Node, devices: Sequence[Mapping[str, str]], pids: Sequence[int], ranks: int) -> Iterator[Check]:
    """Yield the problems that are visible in the facts about one node, without comparing it with other nodes.

    devices: the devices of this node's ranks, as torch identifies them.
    pids: the process ids of these ranks.
    ranks: the number of ranks in the job.
    """
    for place in node.places:
        yield _place(place)
    gpus = gpus_of_job(node, devices)
    yield from _answering_gpus(node)
    for gpu in gpus:
        yield from _memory(gpu, node, pids)
        yield from _health(gpu)
    yield from _xids(node, gpus)
    if ranks > 1 and (divided := [gpu.uuid for gpu in gpus if gpu.mig]):
        names = ", ".join(divided)
        detail = f"MIG divides {names}: a rank uses one instance, and NCCL does not connect two instances of one GPU"
        yield Check("devices", WARNING, detail, "request whole GPUs, or start one rank")


def _place(place: Place) -> Check:
    """Return a check of a folder. A missing TMPDIR is OK, because Python then uses /tmp."""
    if place.missing:
        status = OK if place.what == "TMPDIR" else WARNING
        return Check(place.what, status, f"{place.path} does not exist on this node", "create it in the job")
    shared = place.what == SHARED_MEMORY
    why = f"not writable: {place.error}, " * bool(place.error)
    detail = f"{place.path}, {why}{place.free_gb:.2f} GB free of {place.total_gb:.2f} GB"
    if place.error or (shared and place.free_gb < LEAST_SHARED_GB):
        status = FAIL
    else:
        little = place.free_gb < (LITTLE_GB if shared else min(LITTLE_GB, place.total_gb / 2))
        status = WARNING if little else OK
    advice = "free some space"
    if shared:
        advice = "ask the site to remove other jobs' files; in a container enlarge /dev/shm (--ipc=host, --shm-size)"
    return Check(place.what, status, detail, advice)


# GPUs.


def of_device(gpus: Sequence[Gpu], device: Mapping[str, str]) -> Gpu | None:
    """Return the GPU that has the UUID or the PCI address of `device`, or None.

    device: a rank's device, as torch identifies it.
    """
    # torch: 8932f937-..., nvidia-smi: GPU-8932f937-...
    uuid, pci = device.get("uuid", "").removeprefix("GPU-"), device.get("pci", "").lower()
    for gpu in gpus:
        if (uuid and gpu.uuid.removeprefix("GPU-") == uuid) or (pci and gpu.pci == pci):
            return gpu
    return None


def gpus_of_job(node: Node, devices: Sequence[Mapping[str, str]] = ()) -> tuple[Gpu, ...]:
    """Return the GPUs that Slurm assigned to the job, or the GPUs that the ranks use if Slurm lists none.

    nvidia-smi also lists other jobs' GPUs, unless Slurm's setting ConstrainDevices is on. They are skipped.
    """
    if not node.assigned:
        found = (of_device(node.gpus, device) for device in devices)
        return tuple(dict.fromkeys(gpu for gpu in found if gpu))
    if len(node.gpus) <= len(node.assigned):
        return node.gpus
    return tuple(gpu for index, gpu in enumerate(node.gpus) if str(index) in node.assigned)


def _answering_gpus(node: Node) -> Iterator[Check]:
    """Yield a check if nvidia-smi fails, or lists fewer GPUs than Slurm assigned.

    If a GPU is in MIG mode, don't compare the numbers: Slurm counts MIG instances, but nvidia-smi counts GPUs.
    """
    if not node.assigned:
        return
    if node.gpu_error:
        advice = f"{ASK_SITE}: the GPU needs a reset, or the node a reboot"
        yield Check("devices", FAIL, f"nvidia-smi fails: {node.gpu_error}", advice)
    elif node.gpus and len(node.gpus) < len(node.assigned) and not any(gpu.mig for gpu in node.gpus):
        detail = f"nvidia-smi lists {len(node.gpus)} of the {len(node.assigned)} GPUs that Slurm assigned"
        yield Check("devices", FAIL, detail, f"{ASK_SITE}: a GPU is lost")


def _others(gpu: Gpu, node: Node, pids: Sequence[int]) -> list[GpuProcess]:
    return [one for one in gpu.processes if one.pid not in pids and not (node.job and one.job == node.job)]


def _foreign_mb(gpu: Gpu, others: Sequence[GpuProcess]) -> float:
    """Return how many MiB of the GPU's memory the processes `others` use.

    If nvidia-smi does not show this, for example in a container, return all memory in use.
    """
    known = [one.used_mb for one in others if one.used_mb is not None]
    return sum(known) if known else (gpu.used_mb or 0)


def _memory(gpu: Gpu, node: Node, pids: Sequence[int]) -> Iterator[Check]:
    """Yield a check if processes outside the job use over FOREIGN_MB of the GPU's memory. Skip a GPU in MIG mode."""
    others = _others(gpu, node, pids)
    used = _foreign_mb(gpu, others)
    if gpu.mig or used <= FOREIGN_MB or (gpu.processes and not others):
        return
    detail = f"{used / 1024:.1f} of {(gpu.total_mb or 0) / 1024:.1f} GiB of {gpu.uuid} are in use"
    if not others:
        advice = "look for the process outside this container, or ask the site"
        yield Check("devices' memory", WARNING, f"{detail}, but nvidia-smi lists no process", advice)
        return
    names = ", ".join(f"{one.name} (process {one.pid}, {_owner(one)})" for one in others)
    advice = f"if it is yours: kill {others[0].pid}; otherwise report it to the site"
    yield Check("devices' memory", WARNING, f"{detail} by {names}", advice)


def _owner(process: GpuProcess) -> str:
    return f"job {process.job}" if process.job else process.user or "user unknown"


def _health(gpu: Gpu) -> Iterator[Check]:
    """Yield checks for ECC errors, GPUs that need a recovery, reduced clocks, and PCIe links with too few lanes."""
    about = "devices' health"
    if gpu.ecc_errors:
        detail = f"{gpu.uuid} had {gpu.ecc_errors:.0f} uncorrected ECC errors since its driver was loaded"
        yield Check(about, FAIL, detail, "ask the site to reset the GPU")
    if gpu.recovery:
        yield Check(about, FAIL, f"the driver of {gpu.uuid} requests a recovery action: {gpu.recovery}", ASK_SITE)
    if reasons := [text for bit, text in SLOWED.items() if gpu.slowed & bit]:
        clocks = f", {gpu.sm_mhz:.0f} of {gpu.sm_max_mhz:.0f} MHz" if gpu.sm_mhz and gpu.sm_max_mhz else ""
        detail = f"the clocks of {gpu.uuid} are reduced because of {' and '.join(reasons)}{clocks}"
        yield Check(
            about, WARNING, detail, "report the node to the site, which should check its cooling and power supply"
        )
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        detail = f"the PCIe link of {gpu.uuid} uses {gpu.pcie_width:.0f} of {gpu.pcie_width_max:.0f} lanes"
        yield Check(about, WARNING, detail, f"{ASK_SITE}: copies to this GPU are slow")


def _xids(node: Node, gpus: Sequence[Gpu]) -> Iterator[Check]:
    """Yield a check for each recent error of the job's GPUs in the kernel's log.

    The checks are only warnings, because a reset may have repaired the GPU.
    """
    places = {gpu.pci.rpartition(".")[0] for gpu in gpus if gpu.pci}
    found = [one for one in node.xids if one.number in DEVICE_XIDS and one.age_s < RECENT_S]
    for one in {(one.number, one.pci): one for one in found if not places or one.pci in places}.values():
        detail = f"Xid {one.number} of the GPU at {one.pci}, {one.age_s / 3600:.1f} h ago: {one.text}"
        yield Check("devices' health", WARNING, detail, f"{ASK_SITE} if a job fails: dmesg has the whole message")


def unusable(node: Node) -> str:
    """Return why ranks should not start on the node, or '' if they can.

    If the site shares GPUs between jobs, memory that other processes use is not a reason.
    """
    if lost := next((check.detail for check in _answering_gpus(node)), ""):
        return lost
    for gpu in gpus_of_job(node):
        others = _others(gpu, node, ())
        known = sum(one.used_mb or 0 for one in others)
        if known > OCCUPIED * (gpu.total_mb or 0) > 0 and not gpu.mig and not node.shares_gpus:
            return next(_memory(gpu, node, ())).detail
    return ""


# NCCL's interface.


def nccl_findings(found: Sequence[Nccl], nodes: int) -> Iterator[Check]:
    """Yield a check for each problem that would prevent NCCL from connecting the nodes.

    found: NCCL's choice on each node.
    nodes: the number of nodes in the job.

    Each check's detail names the node. `hosts` contains the node only if it is certainly at fault. If at least half of
    the nodes have a problem, the job's settings probably cause it.
    """
    alone = [check for one in found for check in nccl_alone(one, nodes)]
    for check in alone:
        yield check if 2 * len(alone) < len(found) else replace(check, hosts=())
    yield from nccl_compared(found)


def nccl_alone(one: Nccl, nodes: int) -> Iterator[Check]:
    """Yield the problems that are visible on one node: NCCL's error, or an address that other nodes can't reach."""
    if one.error:
        yield _nccl_error(one)
    elif nodes > 1 and (check := _local_only(one)):
        yield check


def nccl_compared(found: Sequence[Nccl]) -> Iterator[Check]:
    """Yield a check for each difference between nodes that would prevent NCCL from connecting them.

    Nodes that nccl_alone() reports are skipped.
    """
    taken = [one for one in found if one.address and not next(nccl_alone(one, len(found)), None)]
    yield from _same_address(taken)
    yield from _networks(taken)


def _nccl_error(one: Nccl) -> Check:
    names = ", ".join(dict.fromkeys(address.interface for address in one.addresses)) or "no interface"
    wanted = f" with NCCL_SOCKET_IFNAME={one.wanted}" if one.wanted else ""
    detail = f"{one.host}: NCCL fails{wanted}: {one.error}; interfaces that are up: {names}"
    advice = "set cluster.interface to one of them" if one.wanted else "bring up the node's network interface"
    return Check("NCCL's interface", FAIL, detail, advice, (one.host,))


def _local_only(one: Nccl) -> Check | None:
    address, takes = ip_address(one.address), f"{one.host}: NCCL uses {one.interface} ({one.address}), "
    advice = f"check its network interfaces: ip address on {one.host}; or set cluster.interface"
    if address.is_loopback:
        return Check("NCCL's interface", FAIL, f"{takes}which no other node can reach", advice, (one.host,))
    if one.interface.startswith(CONTAINER_BRIDGES):
        return Check("NCCL's interface", FAIL, f"{takes}a bridge inside this node", advice, (one.host,))
    if address.is_link_local:
        return Check("NCCL's interface", FAIL, f"{takes}a link-local address", advice, (one.host,))
    return None


def _same_address(taken: Sequence[Nccl]) -> Iterator[Check]:
    hosts: dict[str, list[str]] = {}
    for one in taken:
        hosts.setdefault(one.address, []).append(one.host)
    for address, same in hosts.items():
        if len(set(same)) > 1:
            detail = f"{', '.join(same)}: NCCL uses the same address on these nodes, {address}"
            yield Check("NCCL's interface", FAIL, detail, "set cluster.interface to the network between the nodes")


def _networks(taken: Sequence[Nccl]) -> Iterator[Check]:
    """Yield a check for each node on which NCCL uses a different network than on most nodes.

    Skip a node that has no interface in the network of the others. It is probably in another rack, behind a router.
    """
    if len(taken) < 2:
        return
    counts = Counter(network_of(one) for one in taken)
    usual = next(one for one in taken if network_of(one) == counts.most_common(1)[0][0])
    certain = len(taken) >= MANY and counts[network_of(usual)] > len(taken) / 2
    advice = "set cluster.interface to an interface that every node has in the same network"
    for one in taken:
        if ip_address(one.address) in network_of(usual) or ip_address(usual.address) in network_of(one):
            continue
        own, other = _address_in(one, network_of(usual)), _address_in(usual, network_of(one))
        if own or other or ip_address(one.address).version != ip_address(usual.address).version:
            also = f"; {one.host} also has {own} in that network" if own else ""
            detail = (
                f"{one.host}: NCCL uses {one.interface} ({one.address}), but on {usual.host} it uses "
                f"{usual.interface} ({usual.address}), which is in another network{also}"
            )
            yield Check("NCCL's interface", FAIL, detail, advice, (one.host,) if certain else ())


def network_of(one: Nccl) -> Network:
    """Return the network of the address that NCCL uses."""
    bits = next((found.bits for found in one.addresses if found.address == one.address), None)
    return ip_interface(f"{one.address}/{bits}" if bits is not None else one.address).network


def _address_in(one: Nccl, network: Network) -> str:
    """Return the node's interface in this network with its address, such as 'eth0 (10.1.0.7)', or ''."""
    for found in one.addresses:
        ip: IPv4Address | IPv6Address = ip_address(found.address)
        if ip in network:
            return f"{found.interface} ({found.address})"
    return ""
