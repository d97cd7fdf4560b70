"""Requesting a diagnosis of a run and presenting it as rows and text."""
