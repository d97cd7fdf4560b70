"""Runs that SLURM starts: the batch script, the job's record in the run directory, the queue."""
