"""State beyond Lightning's checkpoint for an exact resume: data positions, random states."""
