"""Connects the ranks of one start before torch is involved.

Rank 0 listens on the first candidate port that is free. Every other rank connects to the candidates until it finds the
rank 0 of the same job. Both sides prove that they have the same key, which is never sent. Over the same connection a
rank reports its progress, so rank 0 can name the ranks it waits for. A broken connection means that the rank died. When
all ranks are up, rank 0 stops listening, so the rendezvous costs a training run nothing.

Only the standard library is used, because `hpcinit.run` connects before the user's program imports torch. Messages are
JSON lines, and nothing that a peer sends is ever unpickled.
"""
