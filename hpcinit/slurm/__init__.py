"""Everything that calls Slurm's commands or reads what they print. Imports the standard library and base modules."""
