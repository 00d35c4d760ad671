# shellcheck shell=bash
# sbatch passes the user's token for Slurm's commands to the job. Remove it, so that no rank can read it. srun uses munge.
unset SLURM_JWT
