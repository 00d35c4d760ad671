#!/bin/bash
# smoke: -m hpcinit.jobs.smoke, 2 nodes x 2 ranks
# It needs the run folder that hpcinit submit creates, also for its log. A script without one: hpcinit export

# Parameters
#SBATCH --chdir=/shared/me/project
#SBATCH --job-name=smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --time=00:10:00

# setup
# A token for Slurm's commands, which sbatch passes to the job. Without it no rank can read it, and srun uses munge.
unset SLURM_JWT

# The run folder. The ranks write into it as well.
export HPCINIT_RUN=/shared/me/runs/x-0001

# Record the start and the end of this attempt, before the modules, so that a failure there is recorded too.
# bash runs the EXIT trap with status 0 if SIGTERM ended it, hence the trap for TERM.
hpcinit_job="${SLURM_JOB_ID:-$$}" # as squeue names it; without Slurm: the process ID of this script
hpcinit_exit="$HPCINIT_RUN/exit.json"

hpcinit_record() { # that this attempt $1 (began or ended), its exit status $2, and lines of modules and cluster.setup
  printf '{"job": "%s", "pid": %d, "restart": %d, "%s": %d%s%s%s}\n' \
    "$hpcinit_job" "$$" "${SLURM_RESTART_COUNT:-0}" "$1" "$(date +%s)" "${2:+, \"exit_status\": $2}" \
    "${hpcinit_line:+, \"line\": \"$hpcinit_line\"}" "${hpcinit_failed:+, \"failed\": \"$hpcinit_failed\"}" \
    > "$hpcinit_exit.tmp" && mv "$hpcinit_exit.tmp" "$hpcinit_exit"
  [ "$1" = ended ] || { HPCINIT_ALLOCATED=$(date +%s.%N); export HPCINIT_ALLOCATED; }
}
hpcinit_line=""; hpcinit_failed=""
rm -f "$hpcinit_exit"
hpcinit_record began
trap 'exit 143' TERM
trap 'hpcinit_record ended $?' EXIT
HPCINIT_ALLOCATED="${SLURM_JOB_START_TIME:-$HPCINIT_ALLOCATED}" # for hpcinit report

# When the job reaches its time limit. No rank waits longer for the others at the start.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 10))}" HPCINIT_JOB_LIMIT_S=600

# Variables of cluster.env and job.env.
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1

# command
# Start the ranks. Each one runs: python -m hpcinit.jobs.smoke
# Before that, hpcinit prepares the rank by spec.json, where these settings are not the default:
#   layout.dp_replicate=4
/shared/me/venv/bin/python -m hpcinit.engine.local_step --nodes=2 --ntasks=4 --ntasks-per-node=2 \
    --export=ALL --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append \
    --output=/shared/me/runs/x-0001/logs/rank-%t.log \
    /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
