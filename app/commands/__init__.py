"""The commands of ``ltui``: one file for a command or for a small group of commands."""
