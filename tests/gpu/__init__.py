"""The suite for the first GPU machine: `make gpu`. It needs torch, numpy and the standard library only.

Plain pytest does not collect it: the machine it is made for may not have pytest. docs/development/gpu.md has a table of its checks.
"""
