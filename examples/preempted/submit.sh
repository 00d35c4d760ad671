#!/bin/sh
# A training run that may be preempted: it is requeued up to three times, and resumes from its snapshot.
cd "$(dirname "$0")" || exit
hpcinit submit cluster="${CLUSTER:-mini}" nodes=2 ranks_per_node=1 name=preempted restart.max_restarts=3 "$@" -- ../moved/after.py
