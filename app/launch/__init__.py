"""From a preset or a command to a started run: overrides, checks, the training interpreter."""
