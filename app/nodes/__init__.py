"""Start of a run on several machines: by hand, by ssh, or by a launcher."""
