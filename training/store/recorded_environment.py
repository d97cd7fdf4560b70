"""The environment of an attempt, kept so that a resume from another shell trains as before.

Variables that are not set any more are set again; those that are set keep their values, and what
differs is said. Of secrets, digests are kept and no values. Variables of terminals, sessions and
job managers are left out, since they differ each time and no program trains by them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ltui.training.store.redaction import is_secret_name, short_digest
from ltui.training.store.run_directory import RunDir, read_json, write_json
from ltui.training.store.secret_files import holds_secret

_NAMED = 12
"""Number of variables of a kind that are named."""
_OF_SESSIONS = re.compile(
    r"_|\w*PWD|SHLVL|COLUMNS|LINES|\w*TERM|TERM_\w*|TMUX\w*|STY|WINDOW\w*|\w*DISPLAY|MAIL|LOGNAME"
    r"|(?:LTUI|SSH|XDG|DBUS|SLURM|SLURMD|VSCODE|GNOME|DESKTOP|KITTY|ITERM|WT|ZSH|GIT|GPG|HIST|LESS"
    r"|SUDO|SYSTEMD|MEMORY_PRESSURE|STARSHIP|P9K|BASH|LC|PYTEST)_?\w*|LS_COLORS|PS\d|PROMPT\w*|PAGER"
    r"|EDITOR|VISUAL|INVOCATION_ID|JOURNAL_STREAM|COLORTERM|NO_COLOR|TMPDIR|HOSTNAME|LANG"
    r"|CONDA_(?:PROMPT_MODIFIER|SHLVL)|VIRTUAL_ENV_PROMPT"
)


class Recalled(Struct, frozen=True, kw_only=True):
    """The environment of an attempt beside that of this process."""

    variables: Mapping[str, str]
    """Those that are not set now, with their values."""
    text: str
    """A sentence about all that differ; empty if none does."""


def record_environment(run_dir: RunDir, attempt: int, *, values: bool = True) -> None:
    """Keep the environment of this process as that of an attempt. Raises ``OSError``.

    Without ``values`` nothing can be set again: that of a machine says nothing about others.
    """
    variables = _of_programs(os.environ)
    secret = {
        name
        for name, value in variables.items()
        if not values or is_secret_name(name) or holds_secret(os.fsencode(value))
    }
    key = os.urandom(16)
    document = {
        "values": {name: value for name, value in variables.items() if name not in secret},
        "key": key.hex(),
        "digests": {name: short_digest(key, variables[name]) for name in sorted(secret)},
    }
    write_json(run_dir.recorded_environment_path(attempt), document)


def recall_environment(run_dir: RunDir, attempt: int) -> Recalled:
    """Return how the environment of an attempt differs; nothing does if it was not recorded."""
    recorded = _read(run_dir, attempt)
    if recorded is None:
        return Recalled(variables={}, text="")
    values, digests, key = recorded
    then, now = values | digests, _of_programs(os.environ)
    again = {name: then[name] for name in values if name not in now}
    other = [
        name
        for name in now.keys() & then.keys()
        if then[name] != (short_digest(key, now[name]) if name in digests else now[name])
    ]
    kinds = {
        "set again as then": again,
        "not set now, and not kept": [name for name in digests if name not in now],
        "with another value": other,
        "new": now.keys() - then.keys(),
    }
    parts = [f"{kind}: {listed(sorted(names))}" for kind, names in kinds.items() if names]
    text = f"Environment variables, beside attempt {attempt}: {'; '.join(parts)}."
    return Recalled(variables=again, text=text if parts else "")


def recorded_values(run_dir: RunDir, attempt: int) -> dict[str, str]:
    """Return the variables of an attempt, all secrets with the same text; empty if not recorded."""
    values, digests, _ = _read(run_dir, attempt) or ({}, {}, b"")
    # Those of several machines are all kept without values.
    return values | dict.fromkeys(digests, "secret") if values else {}


def _read(run_dir: RunDir, attempt: int) -> tuple[dict[str, str], dict[str, str], bytes] | None:
    """Return values, digests and their key; None if they were not recorded."""
    document: Any = read_json(run_dir.recorded_environment_path(attempt)) or {}
    try:
        values, digests = (
            {str(name): str(value) for name, value in dict(document[part]).items()}
            for part in ("values", "digests")
        )
        return values, digests, bytes.fromhex(document["key"])
    except (KeyError, TypeError, ValueError):
        return None


def _of_programs(variables: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in variables.items() if _OF_SESSIONS.fullmatch(k) is None}


def listed(names: Sequence[str]) -> str:
    """Return names with commas between them; of many, the first ones."""
    more = len(names) - _NAMED
    return ", ".join([*names[:_NAMED], *([f"{more} more"] if more > 0 else [])])
