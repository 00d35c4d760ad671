"""torchx's Slurm scheduler through its Python interface.

`torchx run -s slurm` does the same and then asks sacct for the job's state, which needs accounting and
would count against it here.
"""

from torchx.runner import get_runner

ARGUMENTS = ["--num_replicas", "2", "true"]

with get_runner() as runner:
    print(runner.run_component("utils.sh", ARGUMENTS, "slurm", cfg={"partition": "main", "time": "10"}))
