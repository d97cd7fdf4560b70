"""What the commands and `ltui.api` do: each function does one thing and returns a value."""
