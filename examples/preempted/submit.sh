#!/bin/sh
# A training that may be preempted: it comes back to the queue up to three times, and goes on from its snapshot.
cd "$(dirname "$0")" || exit
hpcinit submit cluster="${CLUSTER:-mini}" nodes=2 ranks_per_node=1 name=preempted restart.max_restarts=3 "$@" -- ../moved/after.py
