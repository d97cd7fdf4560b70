"""The list of runs: its fields, the filter language, and the index."""
