"""How the ranks agree where to stop, pause and save, and how they save a checkpoint."""
