#!/bin/bash
# The C++ compiler without optimization: DeepSpeed's op is built in two thirds of the processor time and computes the same.
words=()
for word in "$@"; do
    case $word in
        -O2 | -O3) words+=(-O0 -g0) ;;
        *) words+=("$word") ;;
    esac
done
exec c++ "${words[@]}"
