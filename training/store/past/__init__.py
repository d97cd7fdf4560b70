"""The past of a run: the record of its snapshots, and the history until a moment."""
