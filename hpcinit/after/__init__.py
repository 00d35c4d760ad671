"""Decides what happens after the ranks of a job have ended. The batch script runs `python -m hpcinit.after`."""
