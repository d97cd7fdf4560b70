"""State of a run: the fold over the ranks' records and the snapshot built from it. Pure."""
