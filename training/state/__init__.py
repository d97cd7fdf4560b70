"""A run's state: the fold over the ranks' records and the snapshot that is made of it. Pure."""
