"""What runs inside a rank: telemetry, agreed stops, checkpoints, the worker entry for presets."""
