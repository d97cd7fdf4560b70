"""The processes of a run on the nodes of a SLURM job."""
