# shellcheck shell=bash disable=SC2154 # variables of run_folder.sh
# This job is one of a chain, and the record of the job before decides whether it runs. It runs
# - if that record has no status: the job was killed, or its first node was lost;
# - after 143 (128 + SIGTERM): Slurm or scancel ended the job;
# - after 0, if the ranks' own record of a stop exists: rank 0 removes it at the end of a program that is done;
# - after any other status, if a node was lost: the ranks on the other nodes then fail as well.
# A requeued job finds its own record, and runs.
hpcinit_check_chain() {
  local job from status
  job=$(hpcinit_fact "$hpcinit_chain" job)
  from=$(hpcinit_fact "$hpcinit_chain" from)
  status=$(hpcinit_fact "$hpcinit_chain" status)
  case $job:$status in
    "$SLURM_JOB_ID":* | *: | *:143) return ;;
    *:0)
      if [ -e "$hpcinit_stopped" ]; then
        [ "$(hpcinit_fact "$hpcinit_stopped" reason)" != not_recorded ] ||
          echo "hpcinit: warning: job $job of this chain stopped, the reason was not recorded; was the disk full?"
        return
      fi
      echo "hpcinit: job $job of this chain has ended well: nothing is left to do for job $SLURM_JOB_ID" ;;
    *)
      ! hpcinit_node_failed "${from:-0}" || return 0
      echo "hpcinit: job $job of this chain has failed by itself ($status): job $SLURM_JOB_ID runs nothing" ;;
  esac
  echo "hpcinit: to run the script again by hand, remove $hpcinit_chain"
  exit "$status"
}
hpcinit_check_chain
rm -f "$hpcinit_chain"
echo "hpcinit: job $SLURM_JOB_ID of a chain begins"
