"""Runs on several nodes: the connection between their supervisors, and mirrors of their files."""
