#!/bin/sh
# Three learning rates as one job array. Each task has its own snapshot, or it would resume from another one's.
# shellcheck disable=SC2016  # ${lr} is for hpcinit, which replaces it for each task
cd "$(dirname "$0")" || exit
hpcinit submit -m cluster="${CLUSTER:-mini}" ranks_per_node=1 name=rates +lr=0.3,0.1,0.001 \
    'job.args=[--lr,"${lr}",--snapshot,"snapshot-${lr}.pt"]' "$@" -- ../moved/after.py
