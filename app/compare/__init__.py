"""Several runs side by side: aligned curves, groups with a band, tables of what differs."""
