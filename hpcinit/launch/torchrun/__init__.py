"""launch=torchrun: torch's elastic agent on each node, with additions for Slurm clusters.

torch's own loop decides (torch.distributed.elastic.agent.server.SimpleElasticAgent). At its documented extension points
hpcinit adds three things: how the agents find each other and report failures (rendezvous_handler); how ranks are
started and ended (agent); what signals mean (agent_signals).
"""
