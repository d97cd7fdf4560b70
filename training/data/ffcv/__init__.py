"""``.beton`` files: writing, checking and reading them by FFCV, or by torch's DataLoader."""
