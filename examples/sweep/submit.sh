#!/bin/sh
# Three learning rates as one job array. Each task has a snapshot of its own, or it would go on from another's.
# shellcheck disable=SC2016  # ${lr} is for hpcinit, which knows it for each task
cd "$(dirname "$0")" || exit
hpcinit submit -m cluster="${CLUSTER:-mini}" ranks_per_node=1 name=rates +lr=0.3,0.1,0.001 \
    'job.args=[--lr,"${lr}",--snapshot,"snapshot-${lr}.pt"]' "$@" -- ../moved/after.py
