"""Judge the health of a run's ranks: which rank is dead, stalled or slow, and why. Pure."""
