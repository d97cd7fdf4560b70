"""The rules of the judgement, one situation for each module. ``diagnosis/judge.py`` calls them."""
