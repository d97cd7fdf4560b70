"""Widgets that draw frozen view models. They have no access to runs, processes or devices."""
