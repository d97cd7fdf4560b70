"""Pure functions from the state of a run to the view models and texts of screens and commands."""
