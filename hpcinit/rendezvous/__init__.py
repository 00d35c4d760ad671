"""Connects the ranks of one attempt before torch is involved.

Rank 0 listens on the first free port of a list that every rank computes. Every other rank tries these ports until it
finds rank 0 of the same job. Both sides prove that they have the same key, which is never sent. Each rank then reports
its progress over the same connection, so that rank 0 can print which ranks are missing. If a connection breaks,
hpcinit treats the rank as dead. When all ranks are up, rank 0 stops listening.

This package uses only the standard library, because `hpcinit.run` connects before the user's program imports torch.
Messages are JSON lines, and hpcinit never unpickles anything that a peer sends.
"""
