"""What node/node_probe.py finds on a node: folders, network interfaces, GPUs, and the interface that NCCL uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A folder to which jobs write.

    what: its purpose, such as 'shared memory'.
    error: why the node cannot write to it, or ''.
    """

    what: str
    path: str
    free_gb: float = 0.0
    total_gb: float = 0.0
    error: str = ""
    missing: bool = False


@dataclass(frozen=True)
class Interface:
    """A network interface or an InfiniBand port.

    gbit: its speed in Gbit/s, as the driver reports it, or 0.
    """

    name: str
    up: bool
    gbit: float = 0.0
    infiniband: bool = False


@dataclass(frozen=True)
class Name:
    """How one node resolves the host name of another node.

    back: the name to which the first address resolves (reverse lookup).
    error: why the name or the address could not be resolved, or ''.
    """

    host: str
    addresses: tuple[str, ...] = ()
    back: str = ""
    error: str = ""


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU.

    used_mb: how many MiB of the GPU's memory it uses, or None if the driver does not report that.
    job: the Slurm job according to the environment of the process, or ''.
    user: the process's user, if the job is unknown.
    """

    pid: int
    name: str
    used_mb: float | None = None
    job: str = ""
    user: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it before the job uses it. Values that nvidia-smi doesn't report are None or ''.

    used_mb, total_mb: memory in MiB.
    ecc: 'Enabled', 'Disabled' or ''.
    ecc_errors: the number of uncorrected errors since the driver was loaded.
    pcie_gen, pcie_width: the PCIe link as it is now. An idle link may use a lower generation than it supports.
    slowed: NVML's bit mask of the reasons for which the clocks are reduced.
    recovery: what a failed GPU needs to work again, such as 'Reset'.

    All clocks are in MHz.
    """

    uuid: str
    pci: str = ""
    used_mb: float | None = None
    total_mb: float | None = None
    ecc: str = ""
    ecc_errors: float | None = None
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    memory_mhz: float | None = None
    memory_max_mhz: float | None = None
    pcie_gen: float | None = None
    pcie_gen_max: float | None = None
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    slowed: int = 0
    mig: bool = False
    recovery: str = ""


@dataclass(frozen=True)
class Xid:
    """An error that NVIDIA's driver wrote to the kernel's log.

    pci: the PCI address of the GPU, such as '0000:ae:00'.
    age_s: how many seconds ago the driver wrote it.
    """

    number: int
    pci: str
    text: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Address:
    """An IP address of a network interface and the length of its network prefix, such as '10.1.0.7' and 16."""

    interface: str
    address: str
    bits: int


@dataclass(frozen=True)
class Nccl:
    """The interface and address that NCCL uses on a node, or why NCCL found none.

    wanted: the value of NCCL_SOCKET_IFNAME, or ''.
    addresses: all addresses of the node.
    seconds: how long NCCL took to answer.
    """

    host: str
    interface: str = ""
    address: str = ""
    error: str = ""
    wanted: str = ""
    version: str = ""
    addresses: tuple[Address, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Node:
    """What the probe found on one node.

    assigned: the GPUs that Slurm gave the job, such as '0'.
    shares_gpus: whether the site lets several jobs share a GPU.
    gpu_error: why nvidia-smi failed, or ''.
    nccl: NCCL's interface, or None if NCCL is not installed or not used.
    """

    memory_gb: float = 0.0
    available_gb: float = 0.0
    kernel: str = ""
    places: tuple[Place, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    names: tuple[Name, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    assigned: tuple[str, ...] = ()
    shares_gpus: bool = False
    job: str = ""
    xids: tuple[Xid, ...] = ()
    nccl: Nccl | None = None
