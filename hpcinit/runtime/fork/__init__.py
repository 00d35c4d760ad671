"""launch=fork: the one task of a node imports once, forks the node's ranks and looks after them. docs/launching.md"""
