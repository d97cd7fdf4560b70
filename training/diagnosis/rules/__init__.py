"""The rules of the judgement, one kind of fault a module. ``diagnosis/judge.py`` calls them."""
