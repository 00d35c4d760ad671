# shellcheck shell=bash disable=SC2154 # variables of record.sh and run_folder.sh
# Count the restarts of this job, and those in a row without progress. Slurm also requeues without asking this script,
# after a preemption or a lost node, so each attempt checks the budget at its start as well.
hpcinit_max_restarts='' # restart.max_restarts
hpcinit_without_progress='' # restart.without_progress

hpcinit_furthest() { # set hpcinit_step, the furthest step so far, and hpcinit_idle, the restarts without progress
  local step
  hpcinit_step=$(hpcinit_fact "$hpcinit_restart" step)
  hpcinit_idle=$(hpcinit_fact "$hpcinit_restart" without_progress)
  : "${hpcinit_step:=null}" "${hpcinit_idle:=0}"
  step=$(hpcinit_fact "$hpcinit_progress" step)
  case $step in '' | *[!0-9]*) return ;; esac
  if [ "$hpcinit_step" = null ] || [ "$step" -gt "$hpcinit_step" ]; then
    hpcinit_step=$step hpcinit_idle=0
  else
    hpcinit_idle=$((hpcinit_idle + 1))
  fi
}
hpcinit_record_restart() { # record restart $1, for the reason $2, with the furthest step so far
  printf '%s\n' "job $hpcinit_job" "restart $1" "step $hpcinit_step" "without_progress $hpcinit_idle" \
    > "$hpcinit_restart.tmp" && mv "$hpcinit_restart.tmp" "$hpcinit_restart" &&
    { [ ! -e "$hpcinit_restarts" ] || cat "$hpcinit_restarts"; } > "$hpcinit_restarts.tmp" &&
    printf '{"job": "%s", "restart": %d, "time": %d, "reason": "%s", "step": %s, %s}\n' \
      "$hpcinit_job" "$1" "$(date +%s)" "$2" "$hpcinit_step" \
      "\"without_progress\": $hpcinit_idle, \"max_restarts\": $hpcinit_max_restarts" >> "$hpcinit_restarts.tmp" &&
    mv "$hpcinit_restarts.tmp" "$hpcinit_restarts"
}
hpcinit_count_restart() { # count restart $1, for the reason $2; return 1 if it is one too many
  hpcinit_furthest
  if [ "$1" -gt "$hpcinit_max_restarts" ]; then
    echo "hpcinit: no restart $1 ($2): restart.max_restarts is $hpcinit_max_restarts; furthest step: $hpcinit_step"
    return 1
  elif [ "$hpcinit_idle" -ge "$hpcinit_without_progress" ]; then
    echo "hpcinit: no restart $1 ($2): $hpcinit_idle restarts in a row made no progress beyond step $hpcinit_step" \
      "(restart.without_progress)"
    return 1
  fi
  # A full disk must not end the job: the budget counts SLURM_RESTART_COUNT, and not these records.
  hpcinit_record_restart "$1" "$2" ||
    echo "hpcinit: warning: cannot record restart $1 ($2) in $hpcinit_restarts" >&2
  return 0
}
hpcinit_attempt=${SLURM_RESTART_COUNT:-0}
if [ "$hpcinit_attempt" -gt 0 ]; then
  echo "hpcinit: new attempt: restart $hpcinit_attempt of job $hpcinit_job starts on $SLURM_JOB_NODELIST"
  [ "$(hpcinit_fact "$hpcinit_restart" job):$(hpcinit_fact "$hpcinit_restart" restart)" = "$hpcinit_job:$hpcinit_attempt" ] ||
    hpcinit_count_restart "$hpcinit_attempt" slurm || exit 1
fi
rm -f "$hpcinit_stopped"
