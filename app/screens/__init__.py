"""The dashboard's screens: each takes frames or lists and hands view models to widgets."""
