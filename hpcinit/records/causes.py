"""The cause of an error message of another program, and what to do about it.

The patterns match messages of torch, NCCL, gloo, Python and Slurm. Errors that hpcinit raises have their kind in the
error record. A secondary error is a consequence of another rank's failure.
"""

from __future__ import annotations

import re

from hpcinit.base import failure_kinds
from hpcinit.records.error_records import ErrorRecord

SECONDARY = re.compile(
    "|".join(
        (
            r"Connection closed by peer",  # gloo
            r"Connection reset by peer",
            r"[Bb]roken pipe",
            r"remote process exited or there was a network error",  # NCCL, ncclRemoteError
            r"ncclRemoteError",
            r"NCCL communicator was aborted",
            r"Watchdog caught collective operation timeout",  # a peer did not join: that one failed or hangs
            r"Timed out waiting \d+ms for (send|recv) operation",  # gloo
            r"[Ff]ailed to recv, got 0 bytes",  # TCPStore: the process of its server ended
            r"DataLoader worker .* killed by signal: Terminated",
            r"^SystemExit: 143$",
            r"SignalException: Process \d+ got signal: 15",  # torchrun's agent
        )
    )
)
TIMEOUT = re.compile(r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for (send|recv) operation")
STOPPED_BY_SIGTERM = re.compile(
    r"DataLoader worker .* killed by signal: Terminated|^SystemExit: 143$|SignalException: .* signal: 15"
)
_CUDA = "lower batch.micro, set activation_checkpointing=full, or shard more: parallel=fsdp or zero3 (hpcinit plan)"
CUDA_MEMORY_OF_PROGRAM = (
    "lower the program's own batch size, or use activation checkpointing or sharding (FSDP, ZeRO) in the program; "
    "it did not use run.wrap, so hpcinit's options for these have no effect"
)
HOST_MEMORY = (
    "request more memory (mem_gb=...; 0: all of a node) or use less: fewer data loader workers, fewer ranks per node"
)
# (kind, pattern of the message, advice). The first match counts.
KINDS = (
    (failure_kinds.CUDA_MEMORY, r"CUDA out of memory|CUDA error: out of memory|HIP out of memory", _CUDA),
    (failure_kinds.HOST_MEMORY, r"DataLoader worker .* killed by signal: Killed|^MemoryError|Cannot allocate memory",
     HOST_MEMORY),
    (failure_kinds.HOST_MEMORY, r"DataLoader worker .* exited unexpectedly",
     "a DataLoader worker exited: its memory ran out (raise mem_gb, or use fewer workers), or the code of the data set "
     "crashed; with num_workers=0 the rank's log shows the traceback"),
    (failure_kinds.SHARED_MEMORY, r"unable to allocate shared memory|DataLoader worker .* Bus error",
     "the node's /dev/shm is full: fewer data loader workers, "
     "or torch.multiprocessing.set_sharing_strategy('file_system')"),
    (failure_kinds.DISK, r"No space left on device|Disk quota exceeded",
     "free space (df -h, quota), or write to another disk: runs_dir, TMPDIR"),
    # torch.save on a full disk: https://github.com/pytorch/pytorch/issues/121833
    (failure_kinds.DISK, r"inline_container\.cc.* unexpected pos|PytorchStreamWriter failed writing|: iostream error",
     "torch could not finish writing a file, usually because the disk is full: check df -h and quota where the program "
     "saves"),
    (failure_kinds.PROGRAM, r"^SystemExit: \d+$",
     "the program called sys.exit with this status; read in the rank's log what it printed before"),
    (failure_kinds.IMPORT, r"^(ModuleNotFoundError|ImportError)",
     "the ranks' Python lacks this module: check cluster.venv, cluster.conda, cluster.modules or container.image"),
    (failure_kinds.NO_GPU, r"Torch not compiled with CUDA enabled|has no attribute '_cuda_setDevice'"
     r"|Found no NVIDIA driver",
     "the ranks' torch has no CUDA support, or their node has no GPU: check cluster.venv, cluster.conda or "
     "container.image; hpcinit doctor cluster=... nodes=1 shows torch and the GPUs of a node"),
    (failure_kinds.GPU, r"NVRM: Xid|ECC error|device-side assert|CUDA error|no CUDA-capable device|GPU is lost",
     "a device-side assert is a bug in the program, often an index out of range: CUDA_LAUNCH_BLOCKING=1 shows the "
     "line; for any other error, if the same node fails again, exclude it (+cluster.sbatch.exclude=NODE) and report it "
     "to the site"),
    (failure_kinds.PORT, r"Address already in use|EADDRINUSE",
     "another process uses the port: hpcinit chooses another one at the next start"),
    (failure_kinds.NOT_A_NUMBER, r"^(?!KeyError).*\b(nan|NaN|FloatingPointError|loss is (nan|inf))\b",
     "training diverged, the cluster is not the cause: lower the learning rate, clip gradients, resume from an earlier "
     "checkpoint"),
    (failure_kinds.FILE, r"^(FileNotFoundError|PermissionError|IsADirectoryError)|error: execve\(\): ",
     "check that the path exists on the compute nodes, and that you may read it there, or write to it"),
    (failure_kinds.NETWORK, r"DistNetworkError|DistStoreError|Rendezvous\w+Error|has no attribute 'is_failed'",
     "a rank could not connect to torch's TCPStore, or lost the connection; first read the log of the node that has "
     "the store (--rdzv-endpoint or MASTER_ADDR)"),
    (failure_kinds.NETWORK, r"ncclSystemError|ncclInternalError|NCCL error|No route to host|Network is unreachable",
     "NCCL lost a connection between nodes; run again with +job.env.NCCL_DEBUG=INFO, and if the same node fails again, "
     "exclude it (+cluster.sbatch.exclude=NODE)"),
)  # fmt: skip
_QUOTED = re.compile(r"""(?<!\w)'[^'\n]*'(?!\w)|(?<!\w)"[^"\n]*"(?!\w)""")
SIGNALS = {
    "Killed": "something sent SIGKILL to the rank: probably the kernel, because the node's memory was full (dmesg on "
    "the node shows it), or a kill -9; request more memory with mem_gb=...",
    "Segmentation fault": "C code crashed; python -X faulthandler shows where; a common cause is a torch built for "
    "another version of CUDA",
    "Bus error": "a memory-mapped file was truncated, or its disk is full: run df -h on that node for /tmp, TMPDIR and "
    "/dev/shm (files of other users and jobs count too)",
    "Terminated": "another process, not hpcinit or Slurm, sent SIGTERM to the rank: a kill command, a watchdog of the "
    "node, or the program itself; ask the site whether the node has a watchdog",
    "Interrupt": "another process, not hpcinit or Slurm, sent SIGINT to the rank: a kill -INT, or the program itself; "
    "read the rank's log",
    "Aborted": "C code aborted; its message is at the end of that rank's log",
}


ADVICE = {
    failure_kinds.PROGRAM: "read the traceback in that rank's log",
    failure_kinds.HANG: "read the stacks of all ranks in hang/ of the run folder",
    failure_kinds.START_UP: "check the log of the missing rank, and its node",
}


def is_secondary_text(error: str) -> bool:
    """Return whether another program's message is a consequence of another rank's failure."""
    return bool(SECONDARY.search(error))


def is_secondary(record: ErrorRecord) -> bool:
    """Return whether the error is a consequence of another rank's failure."""
    return record.kind in failure_kinds.SECONDARY or is_secondary_text(record.foreign)


def is_timeout(record: ErrorRecord) -> bool:
    """Return whether a collective of the rank timed out, because another rank did not call it."""
    return bool(TIMEOUT.search(record.foreign))


def secondary_name(record: ErrorRecord) -> str:
    """Return the name of the secondary error in the record, '' if it is none."""
    if record.kind in failure_kinds.SECONDARY:
        return failure_kinds.SECONDARY[record.kind]
    found = SECONDARY.search(record.foreign)
    return found[0].strip("^$") if found else ""


def kind(error: str) -> tuple[str, str]:
    """Return (kind, advice) of another program's message: ('cuda-memory', ...), or ('program', ...) if none matches.

    A text in quotes may be a value, as in KeyError: 'nan'. Only patterns with quotes match it.
    """
    unquoted = _QUOTED.sub("''", error)
    for name, pattern, advice in KINDS:
        if re.search(pattern, error if "'" in pattern else unquoted):
            return name, advice
    return failure_kinds.PROGRAM, ADVICE[failure_kinds.PROGRAM]


def of_record(record: ErrorRecord) -> tuple[str, str]:
    """Return (kind, advice) of a record. For an error of hpcinit: of what it quotes, or else its own kind.

    Kinds of later versions count as 'program'.
    """
    found = kind(record.foreign)
    if found[0] == failure_kinds.PROGRAM and record.kind in ADVICE:
        return record.kind, ADVICE[record.kind]
    return found
