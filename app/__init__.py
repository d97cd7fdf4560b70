"""The ``ltui`` command, the Textual app, and the code that turns the state of runs into view
models and text."""
