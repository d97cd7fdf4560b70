"""The panels of the screens: Textual containers that give view models to widgets."""
