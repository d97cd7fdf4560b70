"""Start, resume, inspect and end runs from any process. The supervisor builds on this package."""
