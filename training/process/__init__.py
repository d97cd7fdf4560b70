"""Processes of this machine, read from ``/proc``: identity, usage, activity, stacks, exits."""
