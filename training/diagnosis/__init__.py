"""Health of a run's ranks as a pure judgement: which rank is dead, stalled or slow, and why."""
