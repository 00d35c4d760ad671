#!/bin/bash
# smoke: -m hpcinit.jobs.smoke, 2 nodes x 2 ranks
# It needs the run folder that hpcinit submit creates. For a script that needs no run folder: hpcinit export

# Parameters
#SBATCH --chdir=/shared/me/project
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=2
#SBATCH --job-name=smoke
# --no-kill: the job continues without a node that fails, and the ranks restart on a spare node.
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

# sbatch passes the user's token for Slurm's commands to the job. Remove it, so that no rank can read it. srun uses munge.
unset SLURM_JWT

# The run folder. The ranks write into it as well.
export HPCINIT_RUN=/shared/me/runs/x-0001

# This job is part of a chain. The job that ends the chain writes its exit status and its id to chain.txt. The jobs after
# it then run nothing. Without that file, this job continues the run. A requeued job does, too.
hpcinit_chain="$HPCINIT_RUN/chain.txt"
if [ -r "$hpcinit_chain" ] && read -r hpcinit_status hpcinit_last < "$hpcinit_chain" &&
  [ "$hpcinit_last" != "$SLURM_JOB_ID" ]; then
  case $hpcinit_status in
    0) echo "hpcinit: job $hpcinit_last of this chain completed, so job $SLURM_JOB_ID has nothing to do" ;;
    *) echo "hpcinit: job $hpcinit_last of this chain failed with exit status $hpcinit_status," \
      "so job $SLURM_JOB_ID runs nothing" ;;
  esac
  echo "hpcinit: to run the script again manually, remove $hpcinit_chain"
  exit "$hpcinit_status"
fi
rm -f "$hpcinit_chain"
echo "hpcinit: new attempt: job $SLURM_JOB_ID of a chain starts"

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

# The chain is over when this job ends, unless Slurm ends it, or hpcinit.after decides that the next job runs.
hpcinit_continues=""
hpcinit_end() { # this job ends with status $1
  hpcinit_record ended "$1"
  [ -n "$hpcinit_continues" ] ||
    { echo "$1 $SLURM_JOB_ID" > "$hpcinit_chain.tmp" && mv "$hpcinit_chain.tmp" "$hpcinit_chain"; }
}
trap 'hpcinit_continues=1; exit 143' TERM
trap 'hpcinit_end $?' EXIT

# After the ranks have ended, hpcinit.after decides what follows: nothing, a restart or a requeue. It runs with the job's
# Python, or else with the Python that submitted the job. It prints WHAT STATUS NODES (hpcinit/after/__main__.py).
hpcinit_pythons=(/shared/me/venv/bin/python /shared/me/hpcinit/bin/python)
hpcinit_policy=(on=node_fail:hang max_restarts=2 without_progress=2 nodes=2) # what the config allows
hpcinit_log="$HPCINIT_RUN/logs/job.log"
hpcinit_stopped="$HPCINIT_RUN/stopped.json"
hpcinit_excluded="" # nodes that the ranks no longer use: n2,n3

hpcinit_decide() { # print what follows after $1, the exit status of the ranks or 'restarted'
  local python
  for python in "${hpcinit_pythons[@]}"; do
    command -v -- "$python" > /dev/null || continue
    "$python" -m hpcinit.after "$1" "job=$hpcinit_job" "job_from=$hpcinit_job_from" "from=$hpcinit_from" \
      "excluded=$hpcinit_excluded" "${hpcinit_policy[@]}" && return
    [ $? -ne 143 ] || return # SIGTERM ended it, and ends this script as well
  done
  echo "hpcinit: error: hpcinit.after cannot start on $(hostname) with ${hpcinit_pythons[*]}, so nothing is restarted" >&2
}
hpcinit_after() { # the ranks ended with status $1: return to start them again in this job, or exit
  local what='' status=$1 nodes=''
  [ "$1" -ne 0 ] || [ -e "$hpcinit_stopped" ] || exit 0
  read -r what status nodes < <(hpcinit_decide "$1")
  case $what in
    again) hpcinit_excluded=$nodes; hpcinit_start; return ;;
    requeued) sleep 60 & wait ;; # Slurm ends this script
    continue) : "${hpcinit_continues:=1}" ;; # the next job of the chain runs
  esac
  exit "${status:-$1}"
}
hpcinit_start() { # the ranks start now: from here on, hang reports and messages of srun are about this start
  hpcinit_record began
  hpcinit_from=$(wc -c 2> /dev/null < "$hpcinit_log")
}
hpcinit_job_from=$(wc -c 2> /dev/null < "$hpcinit_log")
hpcinit_from=$hpcinit_job_from
rm -f "$hpcinit_stopped"
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] ||
  echo "hpcinit: new attempt: restart $SLURM_RESTART_COUNT of job $hpcinit_job starts on $SLURM_JOB_NODELIST"

# The time at which the job reaches its limit. At the start, no rank waits for the others beyond this time.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 10))}" HPCINIT_JOB_LIMIT_S=600

# Variables of cluster.env and job.env.
export OMP_NUM_THREADS=1

# If Slurm or hpcinit.after has started this job again, count the restart, and exit if there were too many.
hpcinit_unlimited='' # 1 without restart.max_restarts: the site limits the restarts
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  read -r hpcinit_what hpcinit_status < <(hpcinit_decide restarted)
  case $hpcinit_what:$hpcinit_unlimited in start:* | :1) ;; *) exit "${hpcinit_status:-1}" ;; esac
fi

# command
# Start the ranks. Each one runs: python -m hpcinit.jobs.smoke
# Before that, hpcinit sets up the rank with spec.json, in which these settings differ from the defaults:
#   layout.dp_replicate=4 stop.continues=true
# The first task of each node checks its node. It reads /proc, /sys and the free space of disks, and runs
# nvidia-smi. It prints problems to the log, and ends and removes nothing.
while :; do
  srun ${hpcinit_excluded:+--overlap --exclude="$hpcinit_excluded"} \
    --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --export=ALL --mpi=none \
    --kill-on-bad-exit=1 --immediate=300 --wait=0 --unbuffered --open-mode=append \
    --output=/shared/me/runs/x-0001/logs/rank-%t.log \
    /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
  hpcinit_after $?
done
