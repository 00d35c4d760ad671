#!/bin/bash
# smoke: -m hpcinit.jobs.smoke, 2 nodes x 2 ranks
# It needs the run folder that hpcinit submit creates. For a script that needs no run folder: hpcinit export

# Parameters
#SBATCH --chdir=/shared/me/project
#SBATCH --job-name=smoke
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --time=00:10:00

# setup
# sbatch passes the user's token for Slurm's commands to the job. Remove it, so that no rank can read it. srun uses munge.
unset SLURM_JWT

# The run folder. The ranks write into it as well.
export HPCINIT_RUN=/shared/me/runs/x-0001

# Record the start and the end of this attempt. This precedes the modules, so that a failure there is recorded too.
# If SIGTERM ends bash, its EXIT trap runs with status 0, hence the trap for TERM.
hpcinit_job="${SLURM_JOB_ID:-$$}" # as squeue names it; without Slurm: the process ID of this script
hpcinit_exit="$HPCINIT_RUN/exit.json"

hpcinit_record() { # write to exit.json: the event $1 (began or ended), the exit status $2, and the lines of the set-up
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

# The time at which the job reaches its limit. At the start, no rank waits for the others beyond this time.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 10))}" HPCINIT_JOB_LIMIT_S=600

# Variables of cluster.env and job.env.
export GLOO_SOCKET_IFNAME=lo
export OMP_NUM_THREADS=1

# command
# Start the ranks. Each one runs: python -m hpcinit.jobs.smoke
# Before that, hpcinit sets up the rank with spec.json, in which these settings differ from the defaults:
#   layout.dp_replicate=4
/shared/me/venv/bin/python -m hpcinit.engine.local_step --nodes=2 --ntasks=4 --ntasks-per-node=2 \
    --export=ALL --mpi=none --kill-on-bad-exit=1 --wait=0 --unbuffered --open-mode=append \
    --output=/shared/me/runs/x-0001/logs/rank-%t.log \
    /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
