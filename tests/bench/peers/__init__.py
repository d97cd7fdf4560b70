"""The tools of the field, measured beside ltui on the same machine and the same work."""
