"""torchx's Slurm scheduler through its Python interface.

`torchx run -s slurm` does the same, but then also calls sacct, which needs accounting and takes more time.
"""

from torchx.runner import get_runner

ARGUMENTS = ["--num_replicas", "2", "true"]

with get_runner() as runner:
    print(runner.run_component("utils.sh", ARGUMENTS, "slurm", cfg={"partition": "main", "time": "10"}))
