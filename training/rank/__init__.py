"""The code that runs inside a rank: telemetry, coordination, checkpoints, and the preset worker."""
