# shellcheck shell=bash
# sbatch passes this token to the job, where every rank could read it, and srun would use it instead of munge.
unset SLURM_JWT
