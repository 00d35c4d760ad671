"""How the ranks of one start find each other before torch is involved.

Rank 0 opens a door at the first of the candidate ports that is free. Every other rank knocks until it finds the
door of its own job: both sides prove that they hold the same key, and nothing is learnt by who does not. Over the
same connection a rank tells how far it got, so that whoever waits knows for whom; a connection that breaks is a
rank that died. When all are up the door closes, and training costs nothing.

Standard library only: `hpcinit.run` meets before the user's program imports torch. Messages are JSON lines, and
nothing that a peer sends is ever unpickled.
"""
