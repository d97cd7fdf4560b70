"""The dashboard's screens. Each converts frames or lists to view models for its widgets."""
