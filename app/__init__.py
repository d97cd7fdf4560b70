"""The ``ltui`` command, the Textual app and its screens, and the translation from facts to shapes."""
