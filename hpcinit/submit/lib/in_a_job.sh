# shellcheck shell=bash
# Stop unless sbatch started this script: outside of a job, srun would request one without the options above.
[ -n "${SLURM_JOB_ID:-}" ] || { echo "not in a Slurm job; start the script with: sbatch $(printf %q "$0")" >&2; exit 2; }
