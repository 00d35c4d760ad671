"""Connects the ranks of one attempt before torch is involved.

Rank 0 listens on the first free port of a list that all ranks know. Every other rank tries these ports until it finds
rank 0 of the same job. Both sides prove that they have the same key. The key itself is never sent. Each rank then
reports its progress over the same connection, so rank 0 can name the ranks for which it is waiting. If a connection
breaks, the rank has died. When all ranks are up, rank 0 stops listening, so the rendezvous doesn't slow down training.

Only the standard library is used, because `hpcinit.run` connects before the user's program imports torch. Messages are
JSON lines, and nothing that a peer sends is ever unpickled.
"""
