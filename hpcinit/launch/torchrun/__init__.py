"""launch=torchrun: torch's elastic agent on each node, with what it lacks on a Slurm cluster.

torch's own loop decides (torch.distributed.elastic.agent.server.SimpleElasticAgent). At the places that it documents
for extension stand parts of ours: how the agents meet and hear of each other's failures (gathering), how ranks are
started and ended (workers), what signals mean (signals).
"""
