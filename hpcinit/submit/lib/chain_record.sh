# shellcheck shell=bash disable=SC2154 # variables of other blocks
# Record this job for the next one of the chain, with its status once it ended.
hpcinit_record_link() { # the exit status $1
  printf '%s\n' "job $SLURM_JOB_ID" "from $hpcinit_chain_from" ${1:+"status $1"} > "$hpcinit_chain.tmp" &&
    mv "$hpcinit_chain.tmp" "$hpcinit_chain"
}
hpcinit_end_link() { # this job ends with status $1
  hpcinit_record ended "$1"
  hpcinit_record_link "$1"
}
rm -f "$hpcinit_stopped"
hpcinit_chain_from=$hpcinit_from
hpcinit_record_link ''
trap 'hpcinit_end_link $?' EXIT
