"""The optional training layer: run.wrap() and checkpoints.

If a program uses neither, this package is never imported.
"""
