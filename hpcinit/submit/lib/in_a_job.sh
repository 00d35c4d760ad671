# shellcheck shell=bash
# Stop unless sbatch started this script: outside of a job, srun requests one without the options above.
[ -n "${SLURM_JOB_ID:-}" ] || { echo "$0 is not in a job; start it with: sbatch $(printf %q "$0")" >&2; exit 2; }
