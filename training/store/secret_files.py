"""Decide which files may hold a secret: their content is not kept with a run.

A file is judged by its name, by the name of the file to which it links, and by what it contains.
Nobody can find every secret, and code that is left out is no longer frozen. So a content counts
only if it has the form of a key that a service gives out, a long random value beside a name such as
``api_key``, or an address with a password.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

KEY_FORMS = {
    "hf_": r"[A-Za-z0-9]{30}",
    "sk-": r"[\w-]{32}",
    "gh[oprsu]_": r"[A-Za-z0-9]{36}",
    "github_pat_": r"\w{50}",
    "glpat-": r"[\w-]{20}",
    "xox[abprs]-": r"[\w-]{10}",
    "AKIA": r"[0-9A-Z]{16}\b",
    "AIza": r"[\w-]{35}",
    r"ya29\.": r"[\w-]{30}",
    "npm_": r"[A-Za-z0-9]{36}",
    "pypi-": r"[\w-]{80}",
    "wandb_v1_": r"\w{40}",
    "dckr_pat_": r"[\w-]{20}",
    r"hooks\.slack\.com/services/\w+/\w+/": r"\w{20}",
}
"""Known kinds of keys: how one begins, and the rest of a complete one."""
PRIVATE_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY"
LEFT_OUT = "may hold a secret"
"""Reason why a file is not kept."""

_NAME = re.compile(
    r"(\.env(\..*)?|.*\.env|\.envrc|[._]?netrc|\.npmrc|\.pypirc|\.pgpass|\.htpasswd"
    r"|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519).*|kaggle\.json"
    r"|.*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk|gpg|asc)"
    r"|.*(credential|secret|service[-_]?account|api[-_]?key|passw(or)?d).*(?<!\.py))",
    re.IGNORECASE,
)
_FOLDERS = frozenset({".aws", ".ssh", ".gnupg", ".kube", ".docker"})
_RANDOM = (
    r"(?=[^\s\"']*[0-9])"
    r"(?:[0-9a-f]{40,}|(?=[^\s\"']*[a-z])(?=[^\s\"']*[A-Z])[0-9A-Za-z/+_=-]{40,})"
)
"""A value that is no identifier, path or sentence."""
_CONTENTS = [
    re.compile(pattern.encode(), re.MULTILINE)
    for pattern in (
        PRIVATE_KEY,
        "|".join(rf"\b{begin}{rest}" for begin, rest in KEY_FORMS.items()),
        # key = "...", environ["API_KEY"] = "...", setdefault("API_KEY", "..."), and without quotes
        # to the end of the line, as in files of a shell, INI and YAML
        r"(?i:key|token|secret|passw(?:or)?d)[\"']?\]?\s*[:=,]\s*"
        rf"(?:[\"']{_RANDOM}[\"']|{_RANDOM}\s*(?:[#;].*)?$)",
        r"machine\s+\S+\s+login\s+\S+\s+password\s+\S{8}",
        # Not what is replaced ({}, a variable of a shell, %(name)s), and no `user:password@`.
        r"://[\w.%+-]*:(?![$*\[(\\]|%[(s]|(?i:passw(?:or)?d|pass|pwd|secret|token|x+)@)"
        r"[^\s/@\"'`{}<>]{3,}@[\w\[]",
    )
]
"""Forms of secrets. One after the other is four times as fast as one pattern of them all."""


def is_secret(name: str) -> bool:
    """Return whether a file may hold a secret, by its name."""
    parts = name.rstrip("/").split("/")
    return _NAME.fullmatch(parts[-1]) is not None or not _FOLDERS.isdisjoint(parts)


def holds_secret(data: bytes) -> bool:
    """Return whether the content of a file looks as if it held a secret."""
    # Without zeros, a text in UTF-16 is one in ASCII.
    texts = {data, data.replace(b"\0", b"")}
    return any(pattern.search(text) for pattern in _CONTENTS for text in texts)


def reason_to_leave_out(root: str, name: str) -> str | None:
    """Return why a file below ``root`` is not kept, by its name and by where it leads."""
    path, root = os.path.realpath(os.path.join(root, name)), os.path.realpath(root)
    if is_secret(name) or is_secret(os.path.relpath(path, root)):
        return LEFT_OUT
    return None if Path(path).is_relative_to(root) else "a link that leads out of the folder"
