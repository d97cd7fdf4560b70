"""The detached supervisor of one run: engine, readings, commands, health, the truth about its state."""
