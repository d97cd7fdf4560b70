"""Exit codes of the ``ltui`` command."""

from __future__ import annotations

EXIT_DONE = 0
"""The command succeeded, or the run finished."""
EXIT_FAILED = 1
"""The run failed, or the request was not carried out."""
EXIT_BAD_INPUT = 2
"""The input was wrong; nothing was started or changed."""
EXIT_STOPPED = 3
"""The run stopped and can be resumed."""
