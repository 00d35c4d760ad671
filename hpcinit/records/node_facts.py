"""The facts that node/node_probe.py reads about a node: folders, interfaces, GPUs, NCCL's interface, leftovers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A folder to which jobs write. what: 'shared memory'. error: why it cannot be written, or ''."""

    what: str
    path: str
    free_gb: float = 0.0
    total_gb: float = 0.0
    error: str = ""
    missing: bool = False


@dataclass(frozen=True)
class Interface:
    """A network interface or an InfiniBand port. gbit: as the driver reports it, else 0."""

    name: str
    up: bool
    gbit: float = 0.0
    infiniband: bool = False


@dataclass(frozen=True)
class Name:
    """How a node resolves another node's name. back: the name of the first address. error: why it cannot, or ''."""

    host: str
    addresses: tuple[str, ...] = ()
    back: str = ""
    error: str = ""


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU. used_mb: MiB of the GPU's memory, or None if the driver does not report it.

    job: the Slurm job in its environment, or ''. user: its user, if the job is unknown.
    """

    pid: int
    name: str
    used_mb: float | None = None
    job: str = ""
    user: str = ""


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi reports it before the job uses it. Values that it does not report are None or ''.

    used_mb, total_mb: MiB. ecc: 'Enabled', 'Disabled' or ''. ecc_errors: uncorrected ones since the driver was loaded.
    Clocks are in MHz. pcie_gen, pcie_width: those of the link now; an idle link may have a lower generation than its
    maximum. slowed: NVML's bits for why the clocks are reduced. recovery: what the driver needs to repair the GPU,
    'Reset'.
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
    """An error that NVIDIA's driver wrote to the kernel's log. pci: of the GPU, '0000:ae:00'. age_s: how long ago."""

    number: int
    pci: str
    text: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Address:
    """An address of an interface, with the bits of its network: '10.1.0.7', 16."""

    interface: str
    address: str
    bits: int


@dataclass(frozen=True)
class Nccl:
    """The interface and address that NCCL uses on a node, or its error. wanted: NCCL_SOCKET_IFNAME.

    addresses: all of the node. seconds: how long the query took.
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
class Leftover:
    """A process of a job that has ended, or that Slurm no longer reports (known: False)."""

    pid: int
    name: str
    jobs: tuple[str, ...]
    known: bool


@dataclass(frozen=True)
class OldFiles:
    """Files in /dev/shm that no process uses. first: one of them. gb: their total size."""

    first: str
    count: int
    gb: float


@dataclass(frozen=True)
class Node:
    """The facts about one node, as the probe found them.

    assigned: the GPUs that Slurm gave the job, '0'. shares_gpus: whether the site shares a GPU between jobs.
    gpu_error: why nvidia-smi failed, or ''. nccl: None if NCCL is not installed or not used.
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
    processes: tuple[Leftover, ...] = ()
    files: OldFiles | None = None
