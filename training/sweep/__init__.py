"""Sweeps: many runs of one program with other parameters. A sweep's file is its only state."""
