"""A real Slurm with several nodes on one machine, for tests and for trying things out.

    with MiniSlurm(nodes=4, gpus=8) as slurm:
        subprocess.run(["srun", "-N4", "hostname"], env=os.environ | slurm.env)

It needs root and Debian's Slurm packages (`missing()` says what is not there, `install()` fetches it) and
nothing else: standard library only.

How it is made: each node is one `sleep` that holds a network, a host-name and a mount namespace; slurmd is
started inside. The controller is such a node too, `ctl`, so nothing listens on the machine itself and any
number of clusters can be up at a time. A further namespace holds the bridge to which all are wired; the
machine has one interface into it, as a login node would.
"""

from tests.minislurm.cluster import MiniSlurm, names, sweep
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.packages import install, missing

__all__ = ["MiniSlurm", "MiniSlurmError", "install", "missing", "names", "sweep"]
