"""The pure core: specs, presets, records folded into a run's state, judgement. No clock, thread, process or file."""
