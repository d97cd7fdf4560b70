"""Shapes on the screen: widgets that draw frozen values handed to them, and know nothing of runs."""
