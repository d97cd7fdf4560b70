"""Shapes on the screen: widgets that draw frozen values and know nothing of runs."""
