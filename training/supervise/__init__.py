"""The detached supervisor of one run: engine, readings, commands, health, its true state."""
