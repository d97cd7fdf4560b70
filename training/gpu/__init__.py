"""What the GPUs of this machine do: readings, whose they are, what is wrong with them. No torch."""
