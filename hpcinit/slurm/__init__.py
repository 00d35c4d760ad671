"""Everything that calls Slurm's commands or parses their output. Imports only the standard library and hpcinit.base."""
