"""Configuration of runs: presets, overrides, checks, the specification. Pure, except that
``presets.py`` reads files.
"""
