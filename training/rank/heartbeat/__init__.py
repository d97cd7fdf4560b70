"""The thread of a rank that proves that Python runs there, and reads the flight recorder."""
