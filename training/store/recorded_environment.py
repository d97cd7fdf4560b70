"""What differs between the environment of an attempt and that of now, by short digests.

Values may be secrets, so they are not stored. Variables that terminals, sessions and job managers
set are left out, since they differ each time and no program trains by them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ltui.training.store.redaction import short_digest
from ltui.training.store.run_directory import RunDir, read_json

PART = "environment"
"""Its key in the document at ``RunDir.secret_digests_path``."""
_NAMED = 8
"""Number of variables that are named."""
_OF_SESSIONS = re.compile(
    r"_|\w*PWD|SHLVL|COLUMNS|LINES|\w*TERM\w*|TERM_\w*|TMUX\w*|STY|WINDOW\w*|\w*DISPLAY|MAIL|LOGNAME"
    r"|(?:LTUI|SSH|XDG|DBUS|SLURM|SLURMD|VSCODE|GNOME|DESKTOP|KITTY|ITERM|WT|ZSH|GIT|GPG|HIST|LESS"
    r"|SUDO|SYSTEMD|MEMORY_PRESSURE|STARSHIP|P9K|COV|PYTEST)_?\w*|LS_COLORS|PS\d|PROMPT\w*|PAGER"
    r"|EDITOR|VISUAL|INVOCATION_ID|JOURNAL_STREAM|NO_COLOR|TMPDIR|HOSTNAME|LANG|LC_\w*|BASH_\w*"
    r"|CONDA_(?:PROMPT_MODIFIER|SHLVL)|VIRTUAL_ENV_PROMPT"
)


def environment_digests(own: Mapping[str, str]) -> dict[str, Any]:
    """Return a new key, and digests with it of the variables of this process and of ``own``, which
    the specification of the run adds."""
    key = os.urandom(16)
    return {"key": key.hex(), "variables": _digests(key, own)}


def environment_changes(run_dir: RunDir, attempt: int, own: Mapping[str, str]) -> str:
    """Return a sentence about what differs from the environment of an attempt.

    It is empty if nothing differs, and for an attempt of which it was not recorded.
    """
    recorded: Any = (read_json(run_dir.secret_digests_path(attempt)) or {}).get(PART)
    try:
        key, then = bytes.fromhex(recorded["key"]), dict(recorded["variables"])
        now = _digests(key, own)
    except (TypeError, ValueError, KeyError):
        return ""
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    words = {(False, True): "is set now", (True, False): "is not set now"}
    parts = [
        f"{name} {words.get((name in then, name in now), 'has another value')}"
        for name in names[:_NAMED]
    ]
    if len(names) > _NAMED:
        parts.append(f"{len(names) - _NAMED} more")
    differs = f"The environment differs from that of attempt {attempt}: {', '.join(parts)}."
    return differs if names else ""


def _digests(key: bytes, own: Mapping[str, str]) -> dict[str, str]:
    return {
        name: short_digest(key, value)
        for name, value in {**os.environ, **own}.items()
        if _OF_SESSIONS.fullmatch(name) is None
    }
