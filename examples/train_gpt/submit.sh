#!/bin/sh
# One program with four kinds of parallelism: DDP, FSDP2, DeepSpeed ZeRO-3, tensor parallel. Only one key differs.
cd "$(dirname "$0")" || exit
for parallel in ddp fsdp zero3 tp; do
    hpcinit submit cluster="${CLUSTER:-mini}" nodes=2 ranks_per_node=2 job=small_gpt parallel="$parallel" name="$parallel" "$@" || exit
done
