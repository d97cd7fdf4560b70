"""The dashboard's screens: each takes frames or lists and hands shapes to widgets."""
