# shellcheck shell=bash
# Stop unless sbatch started this script as a task of a job array, which selects the run folder.
[ -n "${SLURM_ARRAY_TASK_ID:-}" ] ||
  { echo "not in a job array; start a task with: sbatch --array=NUMBER $(printf %q "$0")" >&2; exit 2; }
