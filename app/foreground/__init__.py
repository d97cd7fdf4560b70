"""Follow a run in the terminal until it ends, for ``ltui run``, ``exec`` and ``resume``."""
