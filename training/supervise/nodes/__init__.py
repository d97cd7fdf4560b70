"""The other machines of a run: their agents, and what the head knows of them."""
