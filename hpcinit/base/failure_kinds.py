"""The kinds of failures: values of `kind` in hpcinit's errors, in error records and in verdicts of `hpcinit why`.

From these kinds, hpcinit decides which failure was first, what caused it and what to do. It never parses messages.
"""

from __future__ import annotations

# Set where hpcinit itself raises an error, and written to the record of the rank.
PROGRAM = "program"  # any other error, of the program or of hpcinit
HANG = "hang"  # no rank finished a step for too long
START_UP = "start-up"  # a rank did not finish the rendezvous in time
PEER_LOST = "peer-lost"  # another rank failed during the rendezvous, and this rank was informed

# Used only if a command ends with an error: nothing was started, or there is no job.
REQUEST = "request"  # the request is wrong: a key, a value, an option or the name of a run
SUBMISSION = "submission"  # Slurm or the local engine refused the job, or did not reply
INTERRUPTED = "interrupted"  # by Ctrl-C

# Recognized in the output of other programs, by records/causes.py.
CUDA_MEMORY = "cuda-memory"
HOST_MEMORY = "host-memory"
SHARED_MEMORY = "shared-memory"
DISK = "disk"
IMPORT = "import"
NO_GPU = "no-gpu"
GPU = "gpu"
PORT = "port"
NOT_A_NUMBER = "not-a-number"
FILE = "file"
NETWORK = "network"

# Used if no rank recorded a cause, but Slurm, an exit status or a command of the user shows what happened.
SIGNAL = "signal"
EARLY_END = "early-end"  # a rank ended with exit status 0 before the others
MISMATCH = "mismatch"  # the ranks called different collectives
NODE = "node"
TIME_LIMIT = "time-limit"
REQUEUED = "requeued"
PREEMPTED = "preempted"
CANCELLED = "cancelled"
SCRIPT = "script"  # the batch script failed before any rank did
UNKNOWN = "unknown"

# Nothing failed.
NONE = "none"
STOPPED = "stopped"  # the user stopped the run

# A consequence of another rank's failure, with the text that `hpcinit why` prints for it.
SECONDARY = {PEER_LOST: "died during start-up"}
