"""The ``ltui`` command, the Textual app and its screens, the translation from facts to shapes."""
