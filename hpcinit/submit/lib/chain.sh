# shellcheck shell=bash disable=SC2154 # variables of other blocks
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
