"""Configuration of runs: presets, overrides, checks, specification.

Pure, except that ``presets.py`` and ``preset_names.py`` read files.
"""
