"""Pure functions from a run to what the screens and the command line show of it."""
