"""The chart widget and its pure parts: braille dots, axes, legend, viewport."""
