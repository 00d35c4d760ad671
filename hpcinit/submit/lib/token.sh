# shellcheck shell=bash
# A token for Slurm's commands, which sbatch passes to the job. Without it no rank can read it, and srun uses munge.
unset SLURM_JWT
