"""Recognizes error messages of other programs: what each message means, which ranks it names, and what to do about it.

The tables of patterns match messages of torch, NCCL, gloo, the CUDA driver, DeepSpeed, Megatron-LM, Python and Slurm.
Errors that hpcinit raises need no pattern, because their error record contains the kind. A secondary error is an error
that another rank's failure caused.
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
            r"Watchdog caught collective operation timeout",  # a peer that failed or hangs did not make the call
            r"Timed out waiting \d+ms for (send|recv) operation",  # gloo
            r"[Ff]ailed to recv, got 0 bytes",  # TCPStore: the process that serves the store ended
            r"DataLoader worker .* killed by signal: Terminated",
            r"^SystemExit: 143$",
            r"SignalException: Process \d+ got signal: 15",  # torchrun's agent
            r"Horovod has been shut down",
            r"successfully reached monitoredBarrier, but received errors",
            r"EngineDeadError|vLLM server can't be reached",  # another process of vLLM ended
            r"NVRM: Xid .*: 45, ",  # the driver removes a process after another error
        )
    )
)
# Python prints the same messages for any socket, such as the socket of a download or a logger. torch's C++ code raises
# RuntimeError and Dist...Error.
OF_ANY_SOCKET = re.compile(r"Connection (?:closed|reset) by peer|[Bb]roken pipe")
OF_RANKS = re.compile(r"^(?:[\w.]*\.)?(?:RuntimeError|Dist\w*Error)\b|gloo|nccl|c10d|TCPStore|UCX|MPI", re.IGNORECASE)
# The rank that serves the store is at fault, whether it is late or has ended.
NAMES_THE_CAUSE = re.compile(r"retrieving ncclUniqueId from \[\d+\]")
# In a traceback: code that communicates with other ranks, or with the rank's own workers.
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
    "each process must use a different GPU: call torch.cuda.set_device(LOCAL_RANK), and start at most as many "
    "processes per node as it has GPUs; if each process sees only one GPU, use device 0 instead"
)
_DIVERGED = (
    "the training diverged; the cluster is not the cause: lower the learning rate, clip gradients, or resume from an "
    "earlier checkpoint"
)
_HARDWARE = (
    "exclude the node (+cluster.sbatch.exclude=NODE) and report it to the cluster's support; nvidia-smi -q and dmesg "
    "on the node show the error"
)
_KERNEL = (
    "a GPU kernel of the program used an invalid index or address, often a label or a token outside its range: run "
    "again with CUDA_LAUNCH_BLOCKING=1, which shows the line"
)
NETWORK = (
    "NCCL could not connect, or lost a connection; run again with +job.env.NCCL_DEBUG=INFO, which shows the interface "
    "(NCCL_SOCKET_IFNAME) and the peer; if the same node fails again, exclude it (+cluster.sbatch.exclude=NODE)"
)
SIGNALS = {
    "Killed": "the rank got SIGKILL, probably from the kernel because the node's memory was full (dmesg on the node "
    "shows it), or from a kill -9; request more memory with mem_gb=...",
    "Segmentation fault": "C code crashed; python -X faulthandler shows where; a common cause is a torch built for "
    "another version of CUDA",
    "Bus error": "a memory-mapped file was truncated, or its disk is full: run df -h on that node for /tmp, TMPDIR and "
    "/dev/shm (files of other users and jobs count too)",
    "Terminated": "neither hpcinit nor Slurm sent this SIGTERM: it was a kill command, a watchdog of the node, or the "
    "program itself; ask the cluster's support whether the node has a watchdog",
    "Hangup": "the process got SIGHUP, because the terminal or the ssh connection was closed; start the program with "
    "sbatch, tmux or nohup",
    "Interrupt": "neither hpcinit nor Slurm sent this SIGINT: it was a kill -INT, or the program itself; read the "
    "rank's log",
    "Aborted": "C code aborted the process; its message is at the end of that rank's log",
}
DIFFERENT_CALLS = "the ranks run different code or have different data: compare what they do before this call"


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
     "that rank serves the store for all ranks, and its process had ended: its own log shows why"),
    Message(failure_kinds.HANG, r"not received the Notify record from remote rank \[(?P<ranks>\d+)\]"  # Ascend's HCCL
     r"|[Mm]issing ranks: \{?(?P<missing>[\d, ]+)|timed out task names: .*?task:(?P<task>\d+)"  # torchfrtrace, JAX
     r"|/task:(?P<lost>\d+) (?:recorded )?(?:heartbeat timeout|has been set to ERROR)"
     r"|stopped sending heartbeats.*?/task:(?P<silent>\d+)",
     "that rank did not reach the collective or barrier: its own log shows what it did instead"),
    # The last patterns are of NCCL, MPI, gloo and Horovod: the size of a message is not what the receiver expects.
    Message(failure_kinds.MISMATCH, r"Detected mismatch between collectives on ranks|Mismatched collective detected"
     r"|op\.preamble\.length <= op\.nbytes|Culprit rank (?P<ranks>\d+); Error type: \w*MISMATCH"  # torchfrtrace
     r"|[Mm]essage truncated ?[:;,]|MPI_ERR_TRUNCATE|collective mismatch error"
     r"|distributed collective mismatch|Mismatched MPI operations"
     r"|Mismatched data types|Mismatched \w+ tensor shapes|Mismatched \w+ root ranks",
     DIFFERENT_CALLS),
    # from torch's TCPStore, on the rank that waits for all others: '3/4 clients joined'
    Message(failure_kinds.START_UP, r"waiting for clients\. \d+/\d+ clients joined|store[ _]based[ _]barrier"
     r"|mismatch in rank count|Invalid rank requested|[Tt]imed out initializing process group",
     "start as many processes as the world size, and read the log of the node that did not connect"),
    Message(failure_kinds.HANG, r"wait timeout after \d+ ?ms, keys",
     "the ranks waited in torch's store for another rank: that rank's log and stack show what it did instead"),
    Message(failure_kinds.HOST_MEMORY, r"(?:exceptions|lang)\.OutOfMemoryError|OOM when allocating .*CPU:\d",
     HOST_MEMORY),
    Message(failure_kinds.CUDA_MEMORY, r"CUDA out of memory|(HIP|XPU|NPU) out of memory|CUDA error: out of memory"
     r"|Failed to CUDA calloc|Cuda failure (?:2 )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
     r"|NCCL WARN .*out of memory|OOM when allocating tensor|RESOURCE_EXHAUSTED: Out of memory", _CUDA),
    # cuBLAS reports this if there is no memory for its handle. In rare cases, the CUDA context is broken.
    Message(failure_kinds.CUDA_MEMORY, r"(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED",
     "the library could not start, usually because the GPU's memory is full (nvidia-smi shows other processes on it); "
     "if not, run once with CUDA_LAUNCH_BLOCKING=1"),
    # torch.multiprocessing shares tensors in files in /dev/shm
    Message(failure_kinds.SHARED_MEMORY, r"unable to allocate shared memory|DataLoader worker .* Bus error"
     r"|to (?:write|mmap|resize|allocate).* </torch_|/dev/shm/nccl-"
     r"|Error while creating shared memory segment",
     "the node's /dev/shm is full: use fewer data loader workers, "
     "or call torch.multiprocessing.set_sharing_strategy('file_system')"),
    # NCCL registers memory, which 'ulimit -l' limits
    Message(failure_kinds.NETWORK, r"ibv_reg_mr.*Cannot allocate memory",
     "the limit of locked memory is too low on that node: `ulimit -l` in the job must print unlimited"),
    Message(failure_kinds.HOST_MEMORY, r"DataLoader worker .* killed by signal: Killed"
     r"|^MemoryError|_ArrayMemoryError|Cannot allocate memory|DefaultCPUAllocator: |^std::bad_alloc"
     r"|node running low on memory|low on resource: memory|\bOOMKilling\b|SystemOOM|memory pressure \(OOM\)",
     HOST_MEMORY),
    Message(failure_kinds.SIGNAL, r"DataLoader worker .* killed by signal: ",
     "a DataLoader worker crashed, often in a library that decodes data: run the program with num_workers=0 and "
     "python -X faulthandler, which shows where"),
    Message(failure_kinds.PROGRAM, r"DataLoader worker .* exited unexpectedly with exit code",
     "the code of the data set made a DataLoader worker exit: run with num_workers=0 to see the traceback"),
    Message(failure_kinds.CUDA_MEMORY, r"\bOutOfMemoryError\b", _CUDA),
    Message(failure_kinds.HOST_MEMORY, r"DataLoader worker .* exited unexpectedly",
     "a DataLoader worker exited, because memory ran out (raise mem_gb, or use fewer workers), or because the code of "
     "the data set crashed (run with num_workers=0 to see the traceback)"),
    Message(failure_kinds.DISK, r"No space left on device|Disk quota exceeded|StorageFull|QuotaExceeded"
     r"|low on resource: ephemeral-storage",
     "free disk space (df -h and quota show how much is used), or use another disk: set runs_dir or TMPDIR"),
    # torch.save on a full disk: https://github.com/pytorch/pytorch/issues/121833
    Message(failure_kinds.DISK, r"inline_container\.cc.* unexpected pos|PytorchStreamWriter failed writing"
     r"|: iostream error",
     "torch could not finish writing a file, usually because the disk is full: check df -h and quota where the program "
     "saves"),
    Message(failure_kinds.PROGRAM, r"^SystemExit: \d+$",
     "the program called sys.exit with this status; the rank's log shows what it printed before"),
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
     r"amdgpu: GPU reset|HW Exception by GPU|ERROR_DEVICE_LOST|"
     r"system not yet initialized",
     _HARDWARE),
    Message(failure_kinds.PROGRAM, r"device-side assert\b|illegal memory access|misaligned address"
     r"|illegal instruction was encountered|Memory access fault by GPU", _KERNEL),
    Message(failure_kinds.PROGRAM, r"Cuda failure (?:1 )?'invalid argument'|CUDA error: invalid argument"
     r"|no kernel image is available|CUDA driver version is insufficient|invalid resource handle"
     r"|nccl version \d+, expected",
     "the versions of torch, NCCL, CUDA and the driver may not be compatible: run python -m torch.utils.collect_env"),
    Message(failure_kinds.GPU, r"HSA_STATUS_ERROR_EXCEPTION",
     "a GPU kernel failed: an index outside its range, or the device; if only one node fails, report it"),
    # An error of the program or of the device. The message does not show which.
    Message(failure_kinds.GPU, r"CUDA error|Cuda failure|unhandled cuda error|HIP error",
     "run once with CUDA_LAUNCH_BLOCKING=1; if only ranks on one node fail, look for Xid errors in its dmesg"),
    Message(failure_kinds.PORT, r"[Aa]ddress already in use|EADDRINUSE",
     "another process uses the port: at the next start, hpcinit chooses another port"),
    # Megatron-LM's rerun state machine
    Message(failure_kinds.NOT_A_NUMBER, r"Unexpected result (?:nan|inf) on rank (?P<ranks>\d+)",
     "read the next messages of Megatron's rerun: if the result is not reproducible, suspect the GPU; otherwise the "
     "training diverged"),
    Message(failure_kinds.NOT_A_NUMBER, r"^(?!KeyError).*\b(nan|NaN|FloatingPointError|loss is (nan|inf))\b",
     _DIVERGED),
    Message(failure_kinds.NOT_A_NUMBER, r"Loss is inf|loss: inf\b|[Nn]on-?finite|\bNaNs\b", _DIVERGED),
    # fairseq; DeepSpeed
    Message(failure_kinds.NOT_A_NUMBER, r"Minimum loss scale reached|loss scale already at minimum", _DIVERGED),
    Message(failure_kinds.FILE, r"^(?:\w+: )?(FileNotFoundError|PermissionError|IsADirectoryError)"
     r"|: can't open file |[Ss]tale (?:NFS )?file handle|[Tt]ransport endpoint (?:is not connected|shutdown): "
     r"|[Rr]ead-only file system"
     r"|: Transport endpoint|error: execve\(\): "
     r"|(?i:\b(?:fatal|error|failed)\b.*: (?:no such file or directory|permission denied)$)",
     "check that the path exists on the compute nodes, and that you may read it there, or write to it"),
    Message(failure_kinds.NETWORK, r"^ssh (?:probably )?could not connect|not reachable via ssh|^ssh: "
     r"|Host key verification failed|Permission denied \((?:publickey|keyboard|password|gssapi)",
     "the launcher uses ssh: from the first node, `ssh HOST hostname` must work for each other node without a "
     "password"),
    # Printed by torch.multiprocessing.spawn. Its process 3 is local rank 3 of a node.
    Message(failure_kinds.SIGNAL, r"ProcessExitedException: process (?P<ranks>\d+) terminated with signal",
     "the message does not show who sent the signal: for SIGKILL, dmesg on the node shows whether its memory was full"),
    Message(failure_kinds.NETWORK, r"HTTPS?ConnectionPool|Max retries exceeded|Failed to resolve|urlopen error"
     r"|[Cc]ould(?:n't| not) connect to",
     "a download failed: compute nodes often have no access to the Internet; download on a login node before the job"),
    Message(failure_kinds.UNKNOWN, r"RendezvousClosedError|has no attribute 'is_failed'",
     "torchrun's agent exited, because the agent of another node had closed the rendezvous after a failure or at the "
     "end of the program"),
    Message(failure_kinds.START_UP, r"RendezvousTimeoutError",
     "fewer torchrun agents than --nnodes connected in time: find the node on which torchrun did not start; its output "
     "shows the reason"),
    Message(failure_kinds.NETWORK, r"DistNetworkError|DistStoreError|Rendezvous\w+Error"
     r"|client socket has timed out|connectFullMesh failed|Name or service not known|name resolution",
     "a rank could not connect to torch's TCPStore, or lost the connection; first read the log of the node that has "
     "the store (--rdzv-endpoint or MASTER_ADDR)"),
    # The driver of Ray, or a pool of processes, reports that a process ended.
    Message(failure_kinds.UNKNOWN, r"ProcessRaisedException:?\s*$|ActorDiedError|RayActorError|WorkerCrashedError"
     r"|BrokenProcessPool",
     "the message does not show why the process ended: look for the reason in its own log, and in dmesg on its node"),
    # NCCL's own result codes: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html
    Message(failure_kinds.PROGRAM, r"ncclInvalidUsage|ncclInvalidArgument|invalid usage|NCCL error.*invalid argument",
     "the program uses NCCL in an invalid way; the line after 'Last error' shows how"),
    Message(failure_kinds.NETWORK, r"no socket interface found|Unable to find address for|is neither AF_INET",
     "no network interface of the node matches NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME: "
     "ip -br address on that node lists them"),
    Message(failure_kinds.NETWORK, r"ncclSystemError|ncclRemoteError|No route to host|Network is unreachable"
     r"|NET/.* error|NET/OFI Unable|NET/.* status=\d+|NET/.* fatal|socketStartConnect"
     r"|retry counter exceeded|Call to (?:connect|ibv_\w+)\b.* failed",
     NETWORK),
    Message(failure_kinds.SIGNAL, r"SignalException: Process \d+ got signal: (?:1$|.*SIGHUP)", SIGNALS["Hangup"]),
    Message(failure_kinds.SIGNAL, r"SignalException: Process \d+ got signal", SIGNALS["Terminated"]),
    Message(failure_kinds.NETWORK, r"lost communication with a remote daemon", NETWORK),
    Message(failure_kinds.NODE, r"DUE TO JOB NOT ENDING WITH SIGNALS",
     "Slurm drains this node, because processes of the job did not end: ask the cluster's support"),
    Message(failure_kinds.SIGNAL, r"Segmentation fault|Bus error|Illegal instruction|core dumped"
     r"|Caught signal \d+", SIGNALS["Segmentation fault"]),
    Message(failure_kinds.SCRIPT, r"Error response from daemon|not enough slots available|OMPI was not built with",
     "the launcher or the container runtime refused to start the program: read its message"),
    Message(failure_kinds.SCRIPT, r"Unable to create step for job",
     "srun requested nodes, tasks or memory that the job does not have: compare its options with those of the job"),
    Message(failure_kinds.SCRIPT, r"command not found$|/sh: .*: not found$",
     "a command was not found: check cluster.modules, cluster.setup, cluster.venv"),
    Message(failure_kinds.UNKNOWN, r"ncclInternalError|NCCL error",
     "NCCL does not report the cause: run again with +job.env.NCCL_DEBUG=INFO"),
)  # fmt: skip
_QUOTED = re.compile(r"""(?<!\w)'[^'\n]*'(?!\w)|(?<!\w)"[^"\n]*"(?!\w)""")


ADVICE = {
    failure_kinds.PROGRAM: "read the traceback in that rank's log",
    failure_kinds.HANG: "read the stacks of all ranks in hang/ of the run folder",
    failure_kinds.START_UP: "check the log of the missing rank, and its node",
}


def unquoted(error: str) -> str:
    """Return an error message without its quoted parts, because they may be values, as in KeyError: 'nan'."""
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
    """Return the name of the recorded error if another rank's failure caused it, otherwise ''."""
    if record.kind in failure_kinds.SECONDARY:
        return failure_kinds.SECONDARY[record.kind]
    found = SECONDARY.search(record.foreign)
    return found[0].strip("^$") if found else ""


@functools.lru_cache(maxsize=64)
def message(error: str) -> tuple[Message, tuple[int, ...]] | None:
    """Return the row of KINDS that matches an error message, and the ranks at fault that the message names.

    Return None if no row matches. Before the search, quoted text is removed, because it may be a value, as in KeyError:
    'nan'. Patterns that contain a quote are searched for in the whole message.
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

    If the message of another program matches a pattern, return the kind and advice for that pattern, even if hpcinit's
    error only quotes the message. Otherwise, return the recorded kind, or 'program' if that is unknown.
    """
    found = kind(record.foreign)
    if found[0] == failure_kinds.PROGRAM and record.kind in ADVICE:
        return record.kind, ADVICE[record.kind]
    return found


# Messages that can have several causes. NCCL's messages show the reason only below 'Last error'.
SEVERAL_CAUSES = re.compile(
    r"unhandled (?:cuda|system) error(?!(?s:.*)Last error:\s*\S)|(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED"
    r"|CUDA error: (?:unspecified launch failure|unknown error|invalid argument|invalid resource handle)"
    r"|HSA_STATUS_ERROR_EXCEPTION"
    r"|DataLoader worker .* exited unexpectedly(?! with)|unexpected pos|PytorchStreamWriter failed"
    r"|[Mm]essage truncated|heartbeat timeout|has been set to ERROR|Rendezvous\w+Error|'is_failed'"
)
_LAST = re.compile(r"Last error:\s*(\S.*)")  # NCCL's message below torch's
_OPEN = re.compile(r":\s*$")  # load_state_dict prints its reasons in the next lines


def has_several_causes(error: str) -> bool:
    """Return whether this message can have several causes, such as NCCL's 'unhandled system error'."""
    return SEVERAL_CAUSES.search(error) is not None


def detail(error: str) -> str:
    """Return the first line of an error message without the name of its type."""
    return brief(error).partition(": ")[2]


def short(error: str) -> str:
    """Return an error message on one line. For an NCCL error, include the reason that NCCL gives."""
    line = brief(error)
    if last := _LAST.search(error):
        return f"{line.partition(':')[0]}: NCCL error: {brief(last[1])}"
    rest = [text.strip() for text in error.splitlines() if text.strip()][1:]
    return f"{line} {brief(rest[0])}" if rest and _OPEN.search(line) else line
