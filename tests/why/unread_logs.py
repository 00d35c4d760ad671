"""20 logs whose first failure has a shape that no reader knows, each with a confusing error of another process after it.

Each item is (name, log, ranks at fault, kinds that are right). The certainty of `hpcinit why` is measured on these logs, so
no reader may learn their shapes.
"""

from __future__ import annotations

TRACE = 'Traceback (most recent call last):\n  File "train.py", line {line}, in <module>\n    main()\n'
EXITED = "srun: error: n{node}: task {rank}: Exited with exit code {code}\n"
TABLE = """\
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_04:00:09
  host      : n{node}
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 4242)
  error_file: <N/A>
============================================================
"""


def _of(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


def _trace(error: str, line: int = 31) -> str:
    return f"{TRACE.format(line=line)}{error}\n"


LOGS: list[tuple[str, str, set[int], set[str]]] = [
    (
        "rust-panic",
        "0: world size 4\n1: step 10 loss 2.1\n"
        "2: thread 'tokenizer' panicked at src/bpe.rs:88:14:\n2: index out of bounds: the len is 3 but the index is 7\n"
        + _of("1: ", _trace("RuntimeError: worker group shrank from 4 to 3"))
        + EXITED.format(node=1, rank=1, code=1),
        {2},
        {"program"},
    ),
    (
        "go-sidecar",
        "0: world size 4\n0: step 4 loss 2.0\n3: goroutine 17 [running]: main.fetch(0xc0)\n3: exit status 2\n"
        + _of("0: ", _trace("ValueError: expected 4 shards, got 3"))
        + EXITED.format(node=1, rank=0, code=1),
        {3},
        {"program"},
    ),
    (
        "java-stack",
        '0: world size 2\n1: Exception in thread "main" java.io.EOFException\n1: \tat org.example.Reader.next(Reader.java:61)\n'
        + _of("0: ", _trace("StopIteration: partner has no batch"))
        + EXITED.format(node=1, rank=0, code=1),
        {1},
        {"program", "file"},
    ),
    (
        "julia",
        "0: world size 4\n2: ERROR: LoadError: BoundsError: attempt to access 4-element Vector{Float32} at index [5]\n"
        "2: Stacktrace:\n2:  [1] throw_boundserror(A::Vector, I::Tuple) @ Base ./abstractarray.jl:734\n"
        + _of("3: ", _trace("AssertionError: gradients of 3 of 4 ranks"))
        + EXITED.format(node=2, rank=3, code=1),
        {2},
        {"program"},
    ),
    (
        "silent-give-up",
        "[rank0]: world size 4\n[rank1]: step 8 loss 1.9\n[rank3]: giving up on shard 7 after 5 attempts, leaving\n"
        + _of("[rank0]: ", _trace("RuntimeError: quorum of 4 lost"))
        + TABLE.format(node=1, rank=0),
        {3},
        {"program", "file", "disk", "network", "early-end"},
    ),
    (
        "loss-scale-word",
        "[rank0]: world size 4\n[rank2]: loss scale at its floor, bye\n"
        + _of("[rank1]: ", _trace("RuntimeError: all_gather returned 3 parts"))
        + TABLE.format(node=1, rank=1),
        {2},
        {"not-a-number"},
    ),
    (
        "fortran",
        "0: world size 2\n0: step 1 loss 3.0\n1: At line 77 of file solver.f90 (unit = 11)\n"
        "1: Fortran runtime error: End of record\n"
        + _of("0: ", _trace("ConnectionAbortedError: solver went away"))
        + EXITED.format(node=1, rank=0, code=1),
        {1},
        {"program", "file"},
    ),
    (
        "glibc",
        "[rank0]: world size 4\n[rank2]: malloc(): corrupted top size\n"
        + _of("[rank0]: ", _trace("OSError: [Errno 107] peer socket is not there"))
        + TABLE.format(node=1, rank=0),
        {2},
        {"signal", "program"},
    ),
    (
        "asan",
        "0: world size 4\n3: ==4242==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602\n3: READ of size 4\n"
        + _of("1: ", _trace("RuntimeError: could not gather metrics from 3"))
        + EXITED.format(node=1, rank=1, code=1),
        {3},
        {"program", "signal"},
    ),
    (
        "quota-in-german",
        "0: world size 4\n2: Schreiben von ckpt-40: Auf dem Gerät ist kein Speicherplatz mehr verfügbar\n"
        + _of("0: ", _trace("FileNotFoundError: [Errno 2] No such file or directory: 'ckpt-40/rank2.pt'"))
        + EXITED.format(node=1, rank=0, code=1),
        {2},
        {"disk"},
    ),
    (
        "gpu-monitor",
        "[rank0]: world size 4\ngpu-watch n2: device 1 volatile uncorrected count 3 -> draining\n"
        + _of("[rank1]: ", _trace("RuntimeError: cudaMemcpyAsync returned 719"))
        + TABLE.format(node=1, rank=1),
        {3},
        {"gpu"},
    ),
    (
        "json-reason",
        '0: world size 4\n{"lvl":50,"rk":2,"reason":"tokenizer.model has 0 bytes"}\n'
        + _of("1: ", _trace("KeyError: 'tokenizer'"))
        + EXITED.format(node=1, rank=1, code=1),
        {2},
        {"program", "file"},
    ),
    (
        "structured-kv",
        "0: world size 4\nlevel=crit rk=3 ev=oom_guard freed=0 verdict=stop\n"
        + _of("0: ", _trace("RuntimeError: 1 of 4 replicas is not ready"))
        + EXITED.format(node=1, rank=0, code=1),
        {3},
        {"host-memory", "cuda-memory"},
    ),
    (
        "r-script",
        "0: world size 2\n1: Error in if (x > 0) { : argument is of length zero\n1: Execution halted\n"
        + _of("0: ", _trace("EOFError"))
        + EXITED.format(node=1, rank=0, code=1),
        {1},
        {"program"},
    ),
    (
        "xla-check",
        "0: world size 4\n2: [libtpu] slice health: chip 3 unhealthy, halting core\n"
        + _of("0: ", _trace("jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Core halted unexpectedly"))
        + EXITED.format(node=1, rank=0, code=1),
        {2},
        {"gpu"},
    ),
    (
        "queue-of-loader",
        "[rank0]: world size 4\n[rank3]: decoder 2 stopped: bad magic in part-0007.tar\n"
        + _of("[rank3]: ", _trace("queue.Empty"))
        + _of("[rank1]: ", _trace("TimeoutError: waited 600 s for the batch of another process"))
        + TABLE.format(node=1, rank=1),
        {3},
        {"program", "file"},
    ),
    (
        "pages-of-another-rank",
        "0: world size 4\n1: !! E7731 allocator arena 2 exhausted (want 2.1G, have 0)\n"
        + _of("2: ", _trace("RuntimeError: CUDA error: peer mapping of a buffer is gone"))
        + EXITED.format(node=2, rank=2, code=1),
        {1},
        {"cuda-memory"},
    ),
    (
        "watchdog-of-site",
        "0: world size 4\nn2 sitewatch[77]: user process 4242 over its share, ending it\n"
        + _of("0: ", _trace("RuntimeError: Connection to n2 lost"))
        + EXITED.format(node=1, rank=0, code=1),
        {2, 3},
        {"signal", "host-memory", "cancelled"},
    ),
    (
        "no-trace-no-word",
        "0: world size 4\n3: assertion `n_heads % tp == 0` is false\n"
        + _of("0: ", _trace("RuntimeError: received 0 of 4096 bytes"))
        + EXITED.format(node=1, rank=0, code=1),
        {3},
        {"program"},
    ),
    (
        "time-limit-of-a-wrapper",
        "[rank0]: world size 4\n[rank0]: step 90 loss 1.1\nwrapper: budget of 3600 s used up, sending USR1\n"
        + _of("[rank2]: ", _trace("InterruptedError: [Errno 4] Interrupted system call"))
        + TABLE.format(node=1, rank=2),
        set(),
        {"time-limit", "cancelled"},
    ),
]
