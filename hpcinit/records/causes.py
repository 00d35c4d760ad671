"""Recognizes error messages of other programs: what each one means, which ranks it names, and what to do about it.

There is one table per question. The patterns match messages of torch, NCCL, gloo, the CUDA driver, DeepSpeed,
Megatron-LM, Python and Slurm. Errors that hpcinit raises need no pattern, because their error record contains the kind.
A secondary error is an error that another rank's failure caused.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from hpcinit.base import failure_kinds
from hpcinit.base.text import MOST_RANKS, brief
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
            r"Horovod has been shut down",
            r"successfully reached monitoredBarrier, but received errors",
            r"EngineDeadError|vLLM server can't be reached",  # vLLM, in another process
            r"NVRM: Xid .*: 45, ",  # the driver removes a process after another error
        )
    )
)
# Python's own sockets break with this text too: a hub's download, a logger. C++ raises RuntimeError and Dist...Error.
OF_ANY_SOCKET = re.compile(r"Connection (?:closed|reset) by peer|[Bb]roken pipe")
OF_RANKS = re.compile(r"^(?:[\w.]*\.)?(?:RuntimeError|Dist\w*Error)\b|gloo|nccl|c10d|TCPStore|UCX|MPI", re.IGNORECASE)
# The rank that has the store is at fault, whether it is late or has ended.
NAMES_THE_CAUSE = re.compile(r"retrieving ncclUniqueId from \[\d+\]")
# In a traceback: where a process talks to other ranks, or to its own workers, which end with it.
TO_RANKS = re.compile(
    r'File "[^"]*(?:torch/distributed/|deepspeed/comm/|horovod/|multiprocessing/|hpcinit/(?:rendezvous|runtime)/)'
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
OUT_OF_MEMORY = "ran out of the memory of this job"  # the subject is a node
HOST_MEMORY = (
    "request more memory (mem_gb=...; 0: all of a node) or use less: fewer data loader workers, fewer ranks per node"
)
_OWN_DEVICE = (
    "each process must use its own GPU: torch.cuda.set_device(LOCAL_RANK), as many processes per node as GPUs, and "
    "either all GPUs of the node visible to each process or one each"
)
_DIVERGED = (
    "training diverged, the cluster is not the cause: lower the learning rate, clip gradients, resume from an earlier "
    "checkpoint"
)
_HARDWARE = (
    "exclude the node (+cluster.sbatch.exclude=NODE) and report it to the site; nvidia-smi -q and dmesg on the node "
    "show the error"
)
_KERNEL = (
    "a kernel of the program used an invalid index or address, often a label or a token outside its range: "
    "CUDA_LAUNCH_BLOCKING=1 shows the line"
)
NETWORK = (
    "NCCL could not connect, or lost a connection; run again with +job.env.NCCL_DEBUG=INFO, which shows the interface "
    "(NCCL_SOCKET_IFNAME) and the peer; if the same node fails again, exclude it (+cluster.sbatch.exclude=NODE)"
)
SIGNALS = {
    "Killed": "something sent SIGKILL to the rank: probably the kernel, because the node's memory was full (dmesg on "
    "the node shows it), or a kill -9; request more memory with mem_gb=...",
    "Segmentation fault": "C code crashed; python -X faulthandler shows where; a common cause is a torch built for "
    "another version of CUDA",
    "Bus error": "a memory-mapped file was truncated, or its disk is full: run df -h on that node for /tmp, TMPDIR and "
    "/dev/shm (files of other users and jobs count too)",
    "Terminated": "another process, not hpcinit or Slurm, sent SIGTERM to the rank: a kill command, a watchdog of the "
    "node, or the program itself; ask the site whether the node has a watchdog",
    "Hangup": "SIGHUP: the terminal or the ssh connection was closed; start the program with sbatch, tmux or nohup",
    "Interrupt": "another process, not hpcinit or Slurm, sent SIGINT to the rank: a kill -INT, or the program itself; "
    "read the rank's log",
    "Aborted": "C code aborted; its message is at the end of that rank's log",
}
DIFFERENT_CALLS = "the ranks run different code or data at this point: compare what they do before this call"


class Message(NamedTuple):
    """An error message of another program that `hpcinit why` recognizes.

    kind: what the message means.
    pattern: a regular expression. Its groups, if any, capture the ranks at fault.
    advice: what the user should do.
    """

    kind: str
    pattern: str
    advice: str


# The first match counts.
KINDS = (
    # torch names the rank that others wait for: ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp, ProcessGroupWrapper.cpp
    Message(failure_kinds.HANG, r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier",
     "that rank did not call the barrier: its own log shows what it did instead"),
    Message(failure_kinds.HANG, r"retrieving ncclUniqueId from \[(?P<ranks>\d+)\].*timeout",
     "that rank did not reach its first collective in time: its own log shows what it did instead"),
    Message(failure_kinds.START_UP, r"retrieving ncclUniqueId from \[(?P<ranks>\d+)\]",
     "that rank has the store, and its process had ended: its own log shows why"),
    Message(failure_kinds.HANG, r"not received the Notify record from remote rank \[(?P<ranks>\d+)\]"  # Ascend's HCCL
     r"|[Mm]issing ranks: \{?(?P<missing>[\d, ]+)|timed out task names: .*?task:(?P<task>\d+)"  # torchfrtrace, JAX
     r"|/task:(?P<lost>\d+) (?:recorded )?(?:heartbeat timeout|has been set to ERROR)"
     r"|stopped sending heartbeats.*?/task:(?P<silent>\d+)",
     "that rank did not reach the collective or barrier: its own log shows what it did instead"),
    # The last ones are of NCCL, MPI, gloo and Horovod: a message of another size than the receiver expects.
    Message(failure_kinds.MISMATCH, r"Detected mismatch between collectives on ranks|Mismatched collective detected"
     r"|op\.preamble\.length <= op\.nbytes|Culprit rank (?P<ranks>\d+); Error type: \w*MISMATCH"  # torchfrtrace
     r"|[Mm]essage truncated ?[:;,]|MPI_ERR_TRUNCATE|distributed collective mismatch|Mismatched MPI operations"
     r"|Mismatched data types|Mismatched \w+ tensor shapes|Mismatched \w+ root ranks",
     DIFFERENT_CALLS),
    # torch's TCPStore of the rank that waits for all: '3/4 clients joined'
    Message(failure_kinds.START_UP, r"waiting for clients\. \d+/\d+ clients joined|store[ _]based[ _]barrier"
     r"|mismatch in rank count|Invalid rank requested|[Tt]imed out initializing process group",
     "start as many processes as the world size, and read the log of the node that did not connect"),
    Message(failure_kinds.HANG, r"wait timeout after \d+ ?ms, keys",
     "the ranks waited in the store for another one: its log and its stack show what it did instead"),
    Message(failure_kinds.HOST_MEMORY, r"(?:exceptions|lang)\.OutOfMemoryError|OOM when allocating .*CPU:\d",
     HOST_MEMORY),
    Message(failure_kinds.CUDA_MEMORY, r"CUDA out of memory|(HIP|XPU|NPU) out of memory|CUDA error: out of memory"
     r"|Failed to CUDA calloc|Cuda failure (?:2 )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
     r"|NCCL WARN .*out of memory|OOM when allocating tensor|RESOURCE_EXHAUSTED: Out of memory", _CUDA),
    # cuBLAS reports this if it finds no memory for its handle; a broken context is rarer.
    Message(failure_kinds.CUDA_MEMORY, r"(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED",
     "the library could not start, usually because the GPU's memory is full (nvidia-smi shows other processes on it); "
     "if not, run once with CUDA_LAUNCH_BLOCKING=1"),
    # torch.multiprocessing shares tensors in files in /dev/shm
    Message(failure_kinds.SHARED_MEMORY, r"unable to allocate shared memory|DataLoader worker .* Bus error"
     r"|to (?:write|mmap|resize|allocate).* </torch_|/dev/shm/nccl-"
     r"|Error while creating shared memory segment",
     "the node's /dev/shm is full: fewer data loader workers, "
     "or torch.multiprocessing.set_sharing_strategy('file_system')"),
    # NCCL registers memory, which 'ulimit -l' limits
    Message(failure_kinds.NETWORK, r"ibv_reg_mr.*Cannot allocate memory",
     "the limit of locked memory is too low on that node: ulimit -l in the job must be unlimited"),
    Message(failure_kinds.HOST_MEMORY, r"DataLoader worker .* killed by signal: Killed"
     r"|^MemoryError|_ArrayMemoryError|Cannot allocate memory|DefaultCPUAllocator: |^std::bad_alloc"
     r"|node running low on memory|low on resource: memory|\bOOMKilling\b|SystemOOM|memory pressure \(OOM\)",
     HOST_MEMORY),
    Message(failure_kinds.SIGNAL, r"DataLoader worker .* killed by signal: ",
     "a worker of the data loader crashed, often in a library that decodes its data: run it with num_workers=0 and "
     "python -X faulthandler"),
    Message(failure_kinds.PROGRAM, r"DataLoader worker .* exited unexpectedly with exit code",
     "the code of the data set ended its worker: with num_workers=0 the rank's log shows the traceback"),
    Message(failure_kinds.CUDA_MEMORY, r"\bOutOfMemoryError\b", _CUDA),
    Message(failure_kinds.HOST_MEMORY, r"DataLoader worker .* exited unexpectedly",
     "a DataLoader worker exited: its memory ran out (raise mem_gb, or use fewer workers), or the code of the data set "
     "crashed; with num_workers=0 the rank's log shows the traceback"),
    Message(failure_kinds.DISK, r"No space left on device|Disk quota exceeded|StorageFull|QuotaExceeded"
     r"|low on resource: ephemeral-storage",
     "free space (df -h, quota), or write to another disk: runs_dir, TMPDIR"),
    # torch.save on a full disk: https://github.com/pytorch/pytorch/issues/121833
    Message(failure_kinds.DISK, r"inline_container\.cc.* unexpected pos|PytorchStreamWriter failed writing"
     r"|: iostream error",
     "torch could not finish writing a file, usually because the disk is full: check df -h and quota where the program "
     "saves"),
    Message(failure_kinds.PROGRAM, r"^SystemExit: \d+$",
     "the program called sys.exit with this status; read in the rank's log what it printed before"),
    Message(failure_kinds.IMPORT, r"^(?:\w+: )?(ModuleNotFoundError|ImportError)|python.*: No module named ",
     "the ranks' Python lacks this module: check cluster.venv, cluster.conda, cluster.modules or container.image"),
    Message(failure_kinds.NO_GPU, r"Torch not compiled with CUDA enabled|has no attribute '_cuda_setDevice'"
     r"|Found no NVIDIA driver|no CUDA-capable device|No CUDA GPUs are available|Driver/library version mismatch"
     r"|no GPUs found|[Ff]ailed to initialize NVML|nvidia-container-cli: initialization error",
     "the ranks' torch has no CUDA support, or their node has no GPU: check cluster.venv, cluster.conda or "
     "container.image; hpcinit doctor cluster=... nodes=1 shows torch and the GPUs of a node"),
    Message(failure_kinds.NO_GPU, r"invalid device ordinal|Duplicate GPU detected|machine only has: \[", _OWN_DEVICE),
    # https://docs.nvidia.com/deploy/xid-errors: 13, 31 and 43 are errors of the program, the others of the device.
    Message(failure_kinds.PROGRAM, r"NVRM: Xid .*: (?:13|31|43), ", _KERNEL),
    Message(failure_kinds.GPU, r"NVRM: Xid \(|ECC error|GPU is lost|fallen off the bus|uncorrectable|"
     r"amdgpu: GPU reset|HW Exception by GPU|"
     r"system not yet initialized",
     _HARDWARE),
    Message(failure_kinds.PROGRAM, r"device-side assert\b|illegal memory access|misaligned address"
     r"|illegal instruction was encountered|Memory access fault by GPU", _KERNEL),
    Message(failure_kinds.PROGRAM, r"Cuda failure (?:1 )?'invalid argument'|CUDA error: invalid argument"
     r"|no kernel image is available|CUDA driver version is insufficient|invalid resource handle"
     r"|nccl version \d+, expected",
     "the versions of torch, NCCL, CUDA and the driver may not fit each other: run python -m torch.utils.collect_env"),
    # Of a program or of a device: the message does not show which.
    Message(failure_kinds.GPU, r"CUDA error|Cuda failure|unhandled cuda error|HIP error",
     "run once with CUDA_LAUNCH_BLOCKING=1; if only ranks on one node fail, look for Xid errors in its dmesg"),
    Message(failure_kinds.PORT, r"[Aa]ddress already in use|EADDRINUSE",
     "another process uses the port: hpcinit chooses another one at the next start"),
    Message(failure_kinds.NOT_A_NUMBER, r"^(?!KeyError).*\b(nan|NaN|FloatingPointError|loss is (nan|inf))\b",
     _DIVERGED),
    Message(failure_kinds.NOT_A_NUMBER, r"Loss is inf|loss: inf\b|[Nn]on-?finite|\bNaNs\b", _DIVERGED),
    # fairseq; DeepSpeed
    Message(failure_kinds.NOT_A_NUMBER, r"Minimum loss scale reached|loss scale already at minimum", _DIVERGED),
    Message(failure_kinds.FILE, r"^(?:\w+: )?(FileNotFoundError|PermissionError|IsADirectoryError)"
     r"|: can't open file |[Ss]tale (?:NFS )?file handle|[Tt]ransport endpoint is not connected: "
     r"|: Transport endpoint|error: execve\(\): "
     r"|(?i:\b(?:fatal|error|failed)\b.*: (?:no such file or directory|permission denied)$)",
     "check that the path exists on the compute nodes, and that you may read it there, or write to it"),
    Message(failure_kinds.NETWORK, r"^ssh (?:probably )?could not connect|not reachable via ssh|^ssh: "
     r"|Host key verification failed|Permission denied \((?:publickey|keyboard|password|gssapi)",
     "the launcher uses ssh: ssh HOST hostname must work without a password, from the first node to each other node"),
    # torch.multiprocessing.spawn; its process 3 is rank 3 of a node's ranks
    Message(failure_kinds.SIGNAL, r"ProcessExitedException: process (?P<ranks>\d+) terminated with signal",
     "the message does not show who sent the signal: for SIGKILL, dmesg on the node shows whether its memory was full"),
    Message(failure_kinds.NETWORK, r"HTTPS?ConnectionPool|Max retries exceeded|Failed to resolve|urlopen error"
     r"|[Cc]ould(?:n't| not) connect to",
     "the program could not download: compute nodes often have no access to the Internet; download before the job"),
    Message(failure_kinds.UNKNOWN, r"RendezvousClosedError|has no attribute 'is_failed'",
     "the agent left because another one had closed the rendezvous: after a failure, or at the end of the training"),
    Message(failure_kinds.START_UP, r"RendezvousTimeoutError",
     "fewer agents than --nnodes joined in time: look for the node on which torchrun did not start, and in its output "
     "for the reason"),
    Message(failure_kinds.NETWORK, r"DistNetworkError|DistStoreError|Rendezvous\w+Error"
     r"|client socket has timed out|connectFullMesh failed|Name or service not known|name resolution",
     "a rank could not connect to torch's TCPStore, or lost the connection; first read the log of the node that has "
     "the store (--rdzv-endpoint or MASTER_ADDR)"),
    # The driver of Ray, or a pool of processes, reports that a process ended.
    Message(failure_kinds.UNKNOWN, r"ProcessRaisedException:?\s*$|ActorDiedError|RayActorError|WorkerCrashedError"
     r"|BrokenProcessPool",
     "the message does not show why the process ended: its own log does, and dmesg on its node"),
    # NCCL's own result codes: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html
    Message(failure_kinds.PROGRAM, r"ncclInvalidUsage|ncclInvalidArgument|invalid usage|NCCL error.*invalid argument",
     "the program uses NCCL in an invalid way; the line after 'Last error' shows how"),
    Message(failure_kinds.NETWORK, r"no socket interface found|Unable to find address for|is neither AF_INET",
     "no network interface of the node matches NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: "
     "ip -br address on that node lists them"),
    Message(failure_kinds.NETWORK, r"ncclSystemError|ncclRemoteError|No route to host|Network is unreachable"
     r"|NET/.* error|NET/.* status=\d+|NET/.* fatal|socketStartConnect|retry counter exceeded"
     r"|Call to (?:connect|ibv_\w+)\b.* failed",
     NETWORK),
    Message(failure_kinds.SIGNAL, r"SignalException: Process \d+ got signal: (?:1$|.*SIGHUP)", SIGNALS["Hangup"]),
    Message(failure_kinds.SIGNAL, r"SignalException: Process \d+ got signal", SIGNALS["Terminated"]),
    Message(failure_kinds.NETWORK, r"lost communication with a remote daemon", NETWORK),
    Message(failure_kinds.NODE, r"DUE TO JOB NOT ENDING WITH SIGNALS", "Slurm drains this node: ask the site"),
    Message(failure_kinds.SIGNAL, r"Segmentation fault|Bus error|Illegal instruction|core dumped"
     r"|Caught signal \d+", SIGNALS["Segmentation fault"]),
    Message(failure_kinds.SCRIPT, r"Error response from daemon|not enough slots available|OMPI was not built with",
     "the launcher or the container runtime refused to start the program: read its message"),
    Message(failure_kinds.SCRIPT, r"command not found$|/sh: .*: not found$",
     "a command was not found: check cluster.modules, cluster.setup, cluster.venv"),
    Message(failure_kinds.UNKNOWN, r"ncclInternalError|NCCL error",
     "NCCL does not show the cause here: run again with +job.env.NCCL_DEBUG=INFO"),
)  # fmt: skip
_QUOTED = re.compile(r"""(?<!\w)'[^'\n]*'(?!\w)|(?<!\w)"[^"\n]*"(?!\w)""")


ADVICE = {
    failure_kinds.PROGRAM: "read the traceback in that rank's log",
    failure_kinds.HANG: "read the stacks of all ranks in hang/ of the run folder",
    failure_kinds.START_UP: "check the log of the missing rank, and its node",
}


def unquoted(error: str) -> str:
    """Return an error message without its quoted parts, which can be values, as in KeyError: 'nan'."""
    return _QUOTED.sub("''", error)


def is_secondary_text(error: str, traceback: str = "") -> bool:
    """Return whether an error that hpcinit did not raise is only a consequence of another rank's failure.

    A broken connection is secondary only if it was a connection to another rank.

    traceback: the traceback of the error, or '' if unknown.
    """
    plain = unquoted(error)
    if not (found := SECONDARY.search(plain)) or NAMES_THE_CAUSE.search(error):
        return False
    if not traceback.strip() or not OF_ANY_SOCKET.fullmatch(found[0]) or OF_RANKS.search(plain):
        return True
    return bool(TO_RANKS.search(traceback))


def is_secondary(record: ErrorRecord) -> bool:
    """Return whether the recorded error was caused by another rank's failure."""
    return record.kind in failure_kinds.SECONDARY or is_secondary_text(record.foreign, record.traceback)


def is_timeout(record: ErrorRecord) -> bool:
    """Return whether the rank's error is a collective that timed out because another rank did not call it."""
    return bool(TIMEOUT.search(record.foreign))


def secondary_name(record: ErrorRecord) -> str:
    """Return the name of the secondary error in the record, or '' if the recorded error is not a secondary one."""
    if record.kind in failure_kinds.SECONDARY:
        return failure_kinds.SECONDARY[record.kind]
    found = SECONDARY.search(record.foreign)
    return found[0].strip("^$") if found else ""


@functools.lru_cache(maxsize=64)
def message(error: str) -> tuple[Message, tuple[int, ...]] | None:
    """Return the row of KINDS that matches an error message, and the ranks that the message blames.

    Return None if no row matches. Quoted text is ignored, because it may be a value, as in KeyError: 'nan'. Only
    patterns that contain quotes themselves also match quoted text.
    """
    plain = unquoted(error)
    for row in KINDS:
        if found := re.search(row.pattern, error if "'" in row.pattern else plain, re.MULTILINE):
            named = " ".join(filter(None, found.groupdict().values()))
            ranks = (int(each) for each in re.findall(r"\d{1,7}", named))
            return row, tuple(rank for rank in ranks if rank < MOST_RANKS)
    return None


def kind(error: str) -> tuple[str, str]:
    """Return the kind of an error that hpcinit did not raise, such as 'cuda-memory', and the advice for it.

    If no pattern matches, the kind is 'program'.
    """
    found = message(error)
    return (found[0].kind, found[0].advice) if found else (failure_kinds.PROGRAM, ADVICE[failure_kinds.PROGRAM])


def of_record(record: ErrorRecord) -> tuple[str, str]:
    """Return (kind, advice) for an error record.

    The patterns are applied to the error of the other program, also if hpcinit's message quotes it. If none matches,
    the kind in the record counts. A kind that this version does not know becomes 'program'.
    """
    found = kind(record.foreign)
    if found[0] == failure_kinds.PROGRAM and record.kind in ADVICE:
        return record.kind, ADVICE[record.kind]
    return found


# Messages that several causes have. NCCL's have a reason only below 'Last error'.
SEVERAL_CAUSES = re.compile(
    r"unhandled (?:cuda|system) error(?!(?s:.*)Last error:\s*\S)|(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"
    r"|CUDA error: (?:unspecified launch failure|unknown error|invalid argument|invalid resource handle)"
    r"|DataLoader worker .* exited unexpectedly(?! with)|unexpected pos|PytorchStreamWriter failed"
    r"|[Mm]essage truncated|heartbeat timeout|has been set to ERROR|Rendezvous\w+Error|'is_failed'"
)
_LAST = re.compile(r"Last error:\s*(\S.*)")  # NCCL's message below torch's
_OPEN = re.compile(r":\s*$")  # of load_state_dict, whose reasons follow in further lines


def has_several_causes(error: str) -> bool:
    """Return whether several causes have this message, such as NCCL's 'unhandled system error'."""
    return SEVERAL_CAUSES.search(error) is not None


def detail(error: str) -> str:
    """Return the first line of an error message without the name of its type."""
    return brief(error).partition(": ")[2]


def short(error: str) -> str:
    """Return an error message on one line. For an error of NCCL, the line contains NCCL's reason."""
    line = brief(error)
    if last := _LAST.search(error):
        return f"{line.partition(':')[0]}: NCCL error: {brief(last[1])}"
    rest = [text.strip() for text in error.splitlines() if text.strip()][1:]
    return f"{line} {brief(rest[0])}" if rest and _OPEN.search(line) else line
