"""The pure core: specs, presets, records folded into a run's state, judgement.

No clock, thread or process; only ``presets.py`` reads files.
"""
