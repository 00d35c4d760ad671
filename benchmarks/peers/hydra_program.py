"""A typical project: a @hydra.main program that composes a small config and calls sbatch."""

import shlex
import subprocess

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="settings", config_name="config")
def main(config: DictConfig) -> None:
    cluster = config.cluster
    command = [
        "sbatch",
        "--parsable",
        f"--job-name={config.name}",
        f"--partition={cluster.partition}",
        f"--nodes={config.nodes}",
        f"--ntasks-per-node={cluster.ranks_per_node}",
        f"--gpus-per-node={cluster.gpus_per_node}",
        f"--time={cluster.time_min}",
        f"--wrap={shlex.join(config.command)}",
    ]
    print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


if __name__ == "__main__":
    main()
