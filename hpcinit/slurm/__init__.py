"""Runs Slurm's commands and parses their output. No other package does that.

This package imports only the standard library and hpcinit.base.
"""
