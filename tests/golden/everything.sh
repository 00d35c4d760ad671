#!/bin/bash
# smoke: -m hpcinit.jobs.smoke, 3 nodes x 2 ranks
# It needs the run folder that hpcinit submit creates, also for its log. A script without one: hpcinit export

# Parameters
#SBATCH --account=proj-1
#SBATCH --chdir=/shared/me/project
#SBATCH --comment='a blank, a # and $HOME'
#SBATCH --cpus-per-task=7
#SBATCH --exclusive
#SBATCH --gres=gpu:a100:4
#SBATCH --job-name=smoke
#SBATCH --mail-type=NONE
#SBATCH --mem=512M
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/me/runs/x-0001/logs/job.log
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=01:30:00

# setup
# Stop unless sbatch started this script: outside of a job, srun would request one without the options above.
[ -n "${SLURM_JOB_ID:-}" ] || { echo "not in a Slurm job; start the script with: sbatch $(printf %q "$0")" >&2; exit 2; }
# A token for Slurm's commands, which sbatch passes to the job. Without it no rank can read it, and srun uses munge.
unset SLURM_JWT

# The run folder, and the files in it that this script uses. The ranks write into it as well.
export HPCINIT_RUN=/shared/me/runs/x-0001
hpcinit_exit="$HPCINIT_RUN/exit.json" # start and end of this attempt
hpcinit_log="$HPCINIT_RUN/logs/job.log" # what this script and srun print
hpcinit_stopped="$HPCINIT_RUN/stopped.txt" # why the ranks stopped early: job and reason
hpcinit_restarts="$HPCINIT_RUN/restarts.jsonl" # a line for each restart

# srun returns the highest status of all ranks. After a failure it terminates the others, and returns their 143 or 137.
# Its messages show which rank failed first, and no other code reads them:
#   srun: error: n2: task 3: Killed                  srun: error: n[1-2]: tasks 2-3: Exited with exit code 1
hpcinit_log_lines() { # how many lines the log has now
  wc -l < "$hpcinit_log"
}
hpcinit_failures() { # print 'HOW NODE STATUS' for each failure after line $1; HOW: exited, signal or terminated
  tail -n "+$(($1 + 1))" "$hpcinit_log" | sed -En '
    s/^srun: error: ([^:]*): tasks? [^:]*: Exited with exit code ([0-9]+)$/exited \1 \2/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Terminated.*/terminated \1 143/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Aborted.*/signal \1 134/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Killed.*/signal \1 137/p; t
    s/^srun: error: ([^:]*): tasks? [^:]*: Segmentation fault.*/signal \1 139/p; t
    s/^srun: error: ([^:]*): tasks? .*/signal \1 1/p; t
    s/.*(CANCELLED AT|Job step aborted|forcing job termination).*/terminated - 143/p'
}
hpcinit_own_status() { # srun ended with status $1; return the status of the rank that failed first
  local how status
  [ "$1" -ne 0 ] && read -r how _ status < <(hpcinit_failures "$hpcinit_from") || return "$1"
  # During the grace time of a preemption, only the ranks get SIGTERM.
  [ "$how" != terminated ] && ! hpcinit_preempted || return "$1"
  return "$status"
}
hpcinit_from=$(hpcinit_log_lines)

# Record the start and the end of this attempt, before the modules, so that a failure there is recorded too.
# bash runs the EXIT trap with status 0 if SIGTERM ended it, hence the trap for TERM.
hpcinit_job="${SLURM_JOB_ID:-$$}" # as squeue names it; without Slurm: the process ID of this script

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

# Slurm stores when it decided to preempt a job, and keeps that over a requeue: it counts if it is not before the start.
hpcinit_preempted() { # whether Slurm preempts this attempt
  local job start=''
  job=$(scontrol --oneliner show job "$hpcinit_job" 2>/dev/null)
  [[ $job =~ ' StartTime='([0-9T:-]+) ]] && start=${BASH_REMATCH[1]}
  [[ $job =~ ' PreemptTime='([0-9][0-9T:-]+) && ! ${BASH_REMATCH[1]} < $start ]]
}

# Slurm, or scontrol requeue, started this job again: record it, and mark the start of this attempt in the log.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  printf '{"job": "%s", "restart": %d, "time": %d, "reason": "slurm"}\n' \
    "$hpcinit_job" "$SLURM_RESTART_COUNT" "$(date +%s)" >> "$hpcinit_restarts"
  echo "hpcinit: new attempt: restart $SLURM_RESTART_COUNT of job $hpcinit_job starts on $SLURM_JOB_NODELIST"
  rm -f "$hpcinit_stopped"
fi

# When the job reaches its time limit. No rank waits longer for the others at the start.
export HPCINIT_JOB_END_TIME="${SLURM_JOB_END_TIME:-$(($(date +%s) + 60 * 90))}" HPCINIT_JOB_LIMIT_S=5400

# The network interface and the folders of the cluster.
export NCCL_SOCKET_IFNAME=ib0
export GLOO_SOCKET_IFNAME=ib0

# Modules and the environment of Python.
# For hpcinit why: the line that runs, and the first that fails.
trap '[ "$LINENO" -le 1 ] || hpcinit_line="$LINENO ${BASH_COMMAND%%[!a-zA-Z0-9_./=-]*}"' DEBUG
trap 'case ${#BASH_SOURCE[@]} in 1) : "${hpcinit_failed:=$? $hpcinit_line}" ;; esac' ERR
type module > /dev/null 2>&1 || . /etc/profile
module purge
module load gcc cuda || { echo 'hpcinit: error: cluster.modules: `module load` failed' "on $(hostname)" >&2; exit 1; }
trap - DEBUG ERR; hpcinit_line=''

# Variables of cluster.env and job.env.
export NCCL_DEBUG=WARN
export GREETING='hello world'

# Shell lines of cluster.setup.
# For hpcinit why: the line that runs, and the first that fails.
trap '[ "$LINENO" -le 1 ] || hpcinit_line="$LINENO ${BASH_COMMAND%%[!a-zA-Z0-9_./=-]*}"' DEBUG
trap 'case ${#BASH_SOURCE[@]} in 1) : "${hpcinit_failed:=$? $hpcinit_line}" ;; esac' ERR
ulimit -c 0
trap - DEBUG ERR; hpcinit_line=''

# command
# Start the ranks. hpcinit prepares each one as in spec.json, and runs: -m hpcinit.jobs.smoke
srun --nodes=3 --ntasks=6 --ntasks-per-node=2 --cpus-per-task=7 --export=ALL --mpi=none \
    --kill-on-bad-exit=0 --cpu-bind=cores --gpu-bind=closest --unbuffered --open-mode=append \
    --output=/shared/me/runs/x-0001/logs/rank-%t.log \
    /shared/me/venv/bin/python -u -m hpcinit.run /shared/me/runs/x-0001/spec.json
hpcinit_own_status $?
