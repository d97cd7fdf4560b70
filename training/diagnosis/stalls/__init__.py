"""Find the ranks that make no progress, and the reason. ``find_stalls`` applies the rules. Pure."""
