"""Facts about a rank from stacks, flight recorders, error messages and GPU findings. Pure."""
