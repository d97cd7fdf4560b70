"""Read a run while it trains, and send requests to its supervisor.

The functions may block, so the screens call them in threads.
"""
