"""Configuration of runs: presets, overrides, checks, specification.

Pure, except that ``presets.py`` and ``preset_discovery.py`` read files.
"""
