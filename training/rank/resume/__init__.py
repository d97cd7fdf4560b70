"""Exact resume: the state that Lightning's checkpoints leave out, and how a rank restores it."""
