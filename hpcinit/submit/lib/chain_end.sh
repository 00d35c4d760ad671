# shellcheck shell=bash disable=SC2154 # variables of other blocks
# The chain is over when this job ends, unless Slurm ends it, or hpcinit.after decides that the next job runs.
hpcinit_continues=""
hpcinit_end() { # this job ends with status $1
  hpcinit_record ended "$1"
  [ -n "$hpcinit_continues" ] ||
    { echo "$1 $SLURM_JOB_ID" > "$hpcinit_chain.tmp" && mv "$hpcinit_chain.tmp" "$hpcinit_chain"; }
}
trap 'hpcinit_continues=1; exit 143' TERM
trap 'hpcinit_end $?' EXIT
