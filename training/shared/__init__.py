"""What ranks and the supervisor agree on: records, environment, files of checkpoints.

Standard library only. It is copied into the rank package, so it knows nothing else of ltui.
"""
