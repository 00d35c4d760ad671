# shellcheck shell=bash disable=SC2154 # variables of record.sh and run_folder.sh
# Slurm, or scontrol requeue, started this job again: record it, and mark the start of this attempt in the log.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  printf '{"job": "%s", "restart": %d, "time": %d, "reason": "slurm"}\n' \
    "$hpcinit_job" "$SLURM_RESTART_COUNT" "$(date +%s)" >> "$hpcinit_restarts"
  echo "hpcinit: new attempt: restart $SLURM_RESTART_COUNT of job $hpcinit_job starts on $SLURM_JOB_NODELIST"
  rm -f "$hpcinit_stopped"
fi
