"""Rules about deaths, stopped processes, slowness and early warnings. Pure."""
