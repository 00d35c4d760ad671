"""How the ranks of one start find each other before torch is involved.

Rank 0 listens on the first candidate port that is free. Every other rank connects until it finds the rank 0 of its
own job. Both sides prove that they have the same key; a process without the key learns nothing. Over the
same connection a rank tells how far it got, so that whoever waits knows for whom; a connection that breaks is a
rank that died. When all ranks are up, rank 0 stops listening: the rendezvous costs a training run nothing.

Standard library only: `hpcinit.run` meets before the user's program imports torch. Messages are JSON lines, and
nothing that a peer sends is ever unpickled.
"""
