"""Starting, resuming, finding and ending runs, from any process. The supervisor builds on it."""
