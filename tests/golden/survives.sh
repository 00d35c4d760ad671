#!/bin/bash
# smoke: -m hpcinit.jobs.smoke, 2 nodes x 2 ranks
# It needs the run folder that hpcinit submit creates, also for its log. A script without one: hpcinit export

# Parameters
#SBATCH --chdir=/shared/me/project
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=2
#SBATCH --job-name=smoke
#SBATCH --no-kill
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --partition=main
#SBATCH --requeue
#SBATCH --time=00:10:00

# setup
# Stop unless sbatch started this script: outside of a job, srun would request one without the options above.
[ -n "${SLURM_JOB_ID:-}" ] || { echo "not in a Slurm job; start the script with: sbatch $(printf %q "$0")" >&2; exit 2; }
# A token for Slurm's commands, which sbatch passes to the job. Without it no rank can read it, and srun uses munge.
unset SLURM_JWT

# The run folder, and the files in it that this script uses. The ranks write into it as well.
export HPCINIT_RUN=/shared/me/runs/x-0001

# Read files of the run folder only if no other user could have written them. The open file is checked, so it cannot be
# replaced in between. The rule is that of hpcinit/base/safe_files.py, but a private group counts as other users.
hpcinit_source() { # read the file $1 into this shell, or end the job
  local fd
  exec {fd}< "$1" || { echo "hpcinit: error: $1 cannot be read on $(hostname)" >&2; exit 1; }
  # '1000:600' is the owner and the mode in octal. 2, 3, 6 and 7 for the group or others include the right to write.
  [[ $(stat -Lc %u:%a "/dev/fd/$fd") =~ ^($EUID|0):[0-7]*[0145][0145]$ ]] || {
    echo "hpcinit: error: another user can write $1 ($(stat -c 'owner %U, mode %a' "$1"))," \
      "expected only you: submit again" >&2
    exit 1
  }
  . "/dev/fd/$fd"
  exec {fd}<&-
}
hpcinit_source /shared/me/runs/x-0001/restart-40f87a5d.sh

# When the job reaches its time limit. No rank waits longer for the others at the start.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 10))}" HPCINIT_JOB_LIMIT_S=600

# Variables of cluster.env and job.env.
export OMP_NUM_THREADS=1

# command
# Start the ranks. hpcinit prepares each one as in spec.json, and runs: -m hpcinit.jobs.smoke
hpcinit_ranks() {
  srun ${hpcinit_excluded:+--overlap --exclude="$hpcinit_excluded"} \
    --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --export=ALL --mpi=none \
    --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append \
    --output=/shared/me/runs/x-0001/logs/rank-%t.log \
    /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
  hpcinit_own_status $?
}
hpcinit_run_with_spare_nodes
hpcinit_requeue $?
