"""Runs that ``ltui run``, ``exec`` and ``resume`` follow in the terminal until they end."""
