"""launch=torchrun: runs torch's elastic agent on each node, with additions for Slurm clusters.

The agent's loop is torch's (torch.distributed.elastic.agent.server.SimpleElasticAgent). At its documented extension
points, hpcinit adds three things:

- rendezvous_handler: how the agents find each other and report failures.
- agent: how ranks are started and stopped.
- agent_signals: how an agent reacts to signals.
"""
