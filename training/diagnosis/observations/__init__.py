"""What stacks, flight recorders, error messages and GPU findings show about a rank. Pure."""
