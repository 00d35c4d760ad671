"""The environment that a submission passes on: the user's own, without what belongs to another job."""

from __future__ import annotations

from collections.abc import Mapping

# SBATCH_* beats #SBATCH lines; SLURM_* of a surrounding job binds the new one's steps to the wrong cores
# (https://github.com/goodfire-ai/spd/issues/955) or memory; the others make a rank believe in another world.
FOREIGN = (
    "SBATCH_",
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SALLOC_",
    "PMI_",
    "PMIX_",
    "OMPI_",
    "HOROVOD_",
    "HYDI_",
    "MPI_LOCAL",
    "TORCHELASTIC_",
    "HPCINIT_ENGINE",
    "HPCINIT_RUN",
    "HPCINIT_WORLD",
)
RANKS = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# How clients find Slurm at all: without SLURM_CONF, sbatch looks in DNS
# (https://github.com/facebookincubator/submitit/issues/1814).
KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_CONF_SERVER"}


def clean(env: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """`env` without variables of other jobs, and the sorted names of what was dropped."""
    dropped = sorted(k for k in env if k not in KEPT and (k in RANKS or k.startswith(FOREIGN)))
    return {k: v for k, v in env.items() if k not in dropped}, dropped
