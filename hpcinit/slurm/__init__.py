"""Calls Slurm's commands and parses their output. Only this package does so; it imports only the standard library and
hpcinit.base.
"""
