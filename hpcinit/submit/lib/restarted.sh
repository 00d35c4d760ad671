# shellcheck shell=bash disable=SC2154 # variables of after.sh
# If Slurm or hpcinit.after has started this job again, count the restart, and exit if there were too many.
hpcinit_unlimited='' # 1 without restart.max_restarts: the site limits the restarts
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then
  read -r hpcinit_what hpcinit_status < <(hpcinit_decide restarted)
  case $hpcinit_what:$hpcinit_unlimited in start:* | :1) ;; *) exit "${hpcinit_status:-1}" ;; esac
fi
