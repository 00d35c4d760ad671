"""What an error says of its cause, and what to do next. An echo is an error that another rank's end brings about.

The patterns are of other programs' output: torch, NCCL, gloo, Python, Slurm. What hpcinit itself raises has its kind in
its record.
"""

from __future__ import annotations

import re

from hpcinit.base import errors as kinds
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
            r"Watchdog caught collective operation timeout",  # a peer did not come: it is the cause, or hangs
            r"Timed out waiting \d+ms for (send|recv) operation",  # gloo
            r"failed to recv, got 0 bytes",  # TCPStore, whose host is gone
            r"DataLoader worker .* killed by signal: Terminated",
            r"^SystemExit: 143$",
        )
    )
)
_CUDA = "lower batch.micro, set activation_checkpointing=full, or shard more: parallel=fsdp or zero3 (hpcinit plan)"
HOST_MEMORY = (
    "ask for more memory (mem_gb=...; 0 is all of a node) or use less: fewer data loader workers, fewer ranks a node"
)
# Kind, what its text looks like, what to do. The first that fits.
KINDS = (
    (kinds.CUDA_MEMORY, r"CUDA out of memory|CUDA error: out of memory|HIP out of memory", _CUDA),
    (kinds.HOST_MEMORY, r"DataLoader worker .* killed by signal: Killed|^MemoryError|Cannot allocate memory",
     HOST_MEMORY),
    (kinds.SHARED_MEMORY, r"unable to allocate shared memory|DataLoader worker .* Bus error",
     "the node's /dev/shm is full: fewer data loader workers, "
     "or torch.multiprocessing.set_sharing_strategy('file_system')"),
    (kinds.DISK, r"No space left on device|Disk quota exceeded",
     "make room (df -h, quota), or write elsewhere: runs_dir, TMPDIR"),
    # torch.save where there is no room: https://github.com/pytorch/pytorch/issues/121833
    (kinds.DISK, r"inline_container\.cc.* unexpected pos|PytorchStreamWriter failed writing|: iostream error",
     "torch could not write a file to its end, most often for want of room: df -h and quota, where the program saves"),
    (kinds.PROGRAM, r"^SystemExit: \d+$",
     "the program ended itself with that status (sys.exit): what it printed before that is in that rank's log"),
    (kinds.IMPORT, r"^(ModuleNotFoundError|ImportError)",
     "the ranks' Python lacks it: cluster.venv, cluster.conda, cluster.modules or container.image say which it is"),
    (kinds.NO_GPU, r"Torch not compiled with CUDA enabled|has no attribute '_cuda_setDevice'|Found no NVIDIA driver",
     "the ranks' torch is built for CPUs, or their node has no GPU: cluster.venv, cluster.conda or container.image say "
     "which torch it is; hpcinit doctor cluster=... nodes=1 shows what it finds"),
    (kinds.GPU, r"Xid|ECC error|device-side assert|CUDA error|no CUDA-capable device|GPU is lost",
     "if it is always the same node, leave it out (+cluster.sbatch.exclude=NODE) and tell the site; "
     "a device-side assert is the program's: CUDA_LAUNCH_BLOCKING=1 names the line"),
    (kinds.PORT, r"Address already in use|EADDRINUSE",
     "another process has the port: submit again, hpcinit takes another one"),
    (kinds.NOT_A_NUMBER, r"\b(nan|NaN|FloatingPointError|loss is (nan|inf))\b",
     "the numbers broke, not the cluster: lower the learning rate, clip gradients, go on from an earlier checkpoint"),
    (kinds.FILE, r"^(FileNotFoundError|PermissionError|IsADirectoryError)",
     "is the path there on the compute nodes, and readable?"),
    (kinds.NETWORK, r"ncclSystemError|ncclInternalError|NCCL error|No route to host|Network is unreachable",
     "run it again with NCCL_DEBUG=INFO; if it is always the same node, leave it out (+cluster.sbatch.exclude=NODE)"),
)  # fmt: skip
SIGNALS = {
    "Killed": "signal 9 from outside: the kernel, out of memory (mem_gb=...; dmesg on the node), or a kill -9",
    "Segmentation fault": "a crash in C code: python -X faulthandler shows where; mixed builds of torch and CUDA do it",
    "Bus error": "a memory-mapped file whose disk is full, or that was truncated: look at /tmp, TMPDIR and /dev/shm on "
    "that node (df -h; files of other users and jobs count)",
    "Aborted": "C code gave up; its words are the last of that rank's log",
}


ADVICE = {
    kinds.PROGRAM: "the traceback is in that rank's log",
    kinds.HANG: "see hang/ in the run folder for the stacks of all ranks",
    kinds.START_UP: "look at the log of the rank that is missing, and at its node",
}


def is_secondary_text(error: str) -> bool:
    """Whether the words of another program are those of an error that another rank's end brings about."""
    return bool(SECONDARY.search(error))


def is_secondary(record: ErrorRecord) -> bool:
    """Whether the error is a consequence of another rank's failure."""
    return record.kind in kinds.SECONDARY or is_secondary_text(record.foreign)


def secondary_name(record: ErrorRecord) -> str:
    """Return what is_secondary() found in the record, '' if nothing."""
    if record.kind in kinds.SECONDARY:
        return kinds.SECONDARY[record.kind]
    found = SECONDARY.search(record.foreign)
    return found[0].strip("^$") if found else ""


def kind(error: str) -> tuple[str, str]:
    """('cuda-memory', what to do), or ('program', ...) for an error that is nobody's but the program's.

    error: the words of another program.
    """
    for name, pattern, advice in KINDS:
        if re.search(pattern, error):
            return name, advice
    return kinds.PROGRAM, ADVICE[kinds.PROGRAM]


def of_record(record: ErrorRecord) -> tuple[str, str]:
    """As kind(). For an error of hpcinit: what it quotes, or else its own kind; kinds of later versions count as
    'program'."""
    found = kind(record.foreign)
    if found[0] == kinds.PROGRAM and record.kind in ADVICE:
        return record.kind, ADVICE[record.kind]
    return found
