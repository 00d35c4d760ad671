"""The optional training layer: run.wrap() and checkpoints. A program that uses neither never imports it."""
