# shellcheck shell=bash disable=SC2154 # variables of run_folder.sh
# Record this job for the next one of the chain, with its status once it ended.
hpcinit_record_link() { # the exit status $1
  printf '%s\n' "job $SLURM_JOB_ID" "from $hpcinit_chain_from" ${1:+"status $1"} > "$hpcinit_chain.tmp" &&
    mv "$hpcinit_chain.tmp" "$hpcinit_chain"
}
hpcinit_end_link() { # this job ends with status $1
  hpcinit_record ended "$1"
  hpcinit_record_link "$1"
}
hpcinit_own_status() { # the ranks ended with status $1; return the status of the first one that failed
  # srun returns the highest status of all ranks. After a failure it terminates the others: 143, as if Slurm had ended
  # the job. During the grace time of a preemption, only the ranks get SIGTERM.
  local how=''
  [ "$1" -eq 143 ] && ! hpcinit_preempted || return "$1"
  read -r how _ < <(hpcinit_failures "$hpcinit_from")
  case $how in
    '' | terminated) return "$1" ;;
    signal) return 1 ;;
    *) return "$how" ;;
  esac
}
rm -f "$hpcinit_stopped"
hpcinit_chain_from=$(hpcinit_log_lines)
hpcinit_from=$hpcinit_chain_from
hpcinit_record_link ''
trap 'hpcinit_end_link $?' EXIT
