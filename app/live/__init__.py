"""Reading a run while it trains, and sending requests to it.

May block; the screens call it in threads."""
