"""Request a diagnosis of a run, and present it as rows and as text."""
