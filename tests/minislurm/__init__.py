"""A real Slurm with several nodes on one machine, for tests and experiments.

    with MiniSlurm(nodes=4, gpus=8) as slurm:
        subprocess.run(["srun", "-N4", "hostname"], env=os.environ | slurm.env)

It needs only root, Debian's Slurm packages (`missing()` lists missing ones, `install()` installs them) and the standard
library.

Each node is a `sleep` process with its own network, host name and mount namespaces, and slurmd runs inside. The
controller is also such a node, `ctl`. So nothing listens on the machine itself, and several clusters can run at a time.
Another namespace contains the bridge that connects them. The machine has one interface to it, like a login node.
"""

from tests.minislurm.cluster import MiniSlurm, names, sweep
from tests.minislurm.errors import MiniSlurmError
from tests.minislurm.packages import install, missing

__all__ = ["MiniSlurm", "MiniSlurmError", "install", "missing", "names", "sweep"]
