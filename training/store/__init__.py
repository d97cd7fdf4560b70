"""A run's directory and its history: layout, SQLite store, export."""
