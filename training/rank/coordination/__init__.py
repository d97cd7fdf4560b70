"""Coordination of ranks: they agree where to stop, pause or save, and save checkpoints together."""
