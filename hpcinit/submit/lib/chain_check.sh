# shellcheck shell=bash disable=SC2154 # variables of run_folder.sh
# This job is part of a chain, and the record of the previous job decides whether it runs. It runs
# - if that record has no status: the job was killed, or its first node was lost;
# - after 143 (128 + SIGTERM): Slurm or scancel ended the job;
# - after 0, if the ranks recorded a stop: rank 0 removes that record when the program is done;
# - after any other status, if a node was lost: the ranks on the other nodes then fail as well.
# A requeued job finds its own record, and runs.
hpcinit_node_failed() { # whether a message after line $1 of the log reports a lost node: 'srun: error: Node failure on n2'
  tail -n "+$(($1 + 1))" "$hpcinit_log" | grep -qi 'node failure'
}
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
          echo "hpcinit: warning: job $job of this chain stopped without recording why; was the disk full?"
        return
      fi
      echo "hpcinit: job $job of this chain completed, so job $SLURM_JOB_ID has nothing to do" ;;
    *)
      ! hpcinit_node_failed "${from:-0}" || return 0
      echo "hpcinit: job $job of this chain failed with exit status $status, so job $SLURM_JOB_ID runs nothing" ;;
  esac
  echo "hpcinit: to run the script again manually, remove $hpcinit_chain"
  exit "$status"
}
hpcinit_check_chain
rm -f "$hpcinit_chain"
echo "hpcinit: new attempt: job $SLURM_JOB_ID of a chain starts"
