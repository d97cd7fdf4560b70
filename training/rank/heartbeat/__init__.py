"""The heartbeat thread of a rank, and its reader of the flight recorder."""
