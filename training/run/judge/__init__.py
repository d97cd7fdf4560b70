"""The judgement of a run's ranks, in small parts; its door is ``training/run/health.py``. Pure."""
