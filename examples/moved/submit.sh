#!/bin/sh
# A script for torchrun, unchanged, and the same script with hpcinit (moved.diff).
cd "$(dirname "$0")" || exit
hpcinit submit cluster="${CLUSTER:-mini}" nodes=2 ranks_per_node=1 "$@" -- before.py --snapshot before.pt || exit
hpcinit submit cluster="${CLUSTER:-mini}" nodes=2 ranks_per_node=1 "$@" -- after.py --snapshot after.pt
