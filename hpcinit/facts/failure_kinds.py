"""The kinds of failures: values of `kind` in hpcinit's errors, in error records and in verdicts of `hpcinit why`.

Decisions (which failure came first, who is to blame, what to do) are made by these values, never by a message.
"""

from __future__ import annotations

# Set where hpcinit itself raises an error, and written to the record of the rank.
PROGRAM = "program"  # any other error, of the program or of hpcinit
HANG = "hang"  # the ranks took no step for too long
START_UP = "start-up"  # a rank did not get through the rendezvous in time
PEER_LOST = "peer-lost"  # another rank failed in the rendezvous, and this one heard of it
# Recognized in the output of other programs: facts/causes.py.
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
# Of a run whose ranks left no cause: from Slurm, from exit statuses, or from a person.
SIGNAL = "signal"
NODE = "node"
TIME_LIMIT = "time-limit"
REQUEUED = "requeued"
PREEMPTED = "preempted"
CANCELLED = "cancelled"
SCRIPT = "script"  # the batch script failed before a rank did
UNKNOWN = "unknown"
# Of a run in which nothing failed.
NONE = "none"
STOPPED = "stopped"  # as somebody asked it to

# Consequences of another rank's failure, and what `hpcinit why` calls them.
SECONDARY = {PEER_LOST: "died during start-up"}
