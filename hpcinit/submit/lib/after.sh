# shellcheck shell=bash disable=SC2034,SC2154 # variables of other blocks
# After the ranks have ended, hpcinit.after decides what follows: nothing, a restart or a requeue. It runs with the job's
# Python, or else with the Python that submitted the job. It prints WHAT STATUS NODES (hpcinit/after/__main__.py).
hpcinit_pythons=''
hpcinit_policy='' # what the config allows
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
