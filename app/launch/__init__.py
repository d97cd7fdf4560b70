"""From a person's request to a launched run: read and override the configuration, check it,
start it."""
