"""Variable-length sequences in memory-mapped files."""
