"""The parts that the screens are made of: Textual containers that fill widgets with values."""
