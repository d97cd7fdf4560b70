"""The part of the supervisor that watches health: evidence, judgement, events and calls."""
