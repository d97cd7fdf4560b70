"""A rank whose program does not use Lightning's Trainer: its steps, and pauses between them."""
