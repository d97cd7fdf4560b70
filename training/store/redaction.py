"""Replace secrets and personal paths in texts that leave this machine. Pure.

A secret is the value of a variable with a name such as ``HF_TOKEN``, a value that is assigned to
such a name in a text, the password of an address, and what has the form of a known kind of key.
Nobody can find every secret, so what was replaced is counted and shown, and so are the names.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from urllib.parse import quote

from ltui.training.store.secret_files import KEY_FORMS, PRIVATE_KEY

_NAMES = r"(?:pass(?:word|wd|phrase)|secret|token|credentials?|auth|(?:api|access|private)[_-]?key)"
_SECRET_NAME = re.compile(rf"(?:^|[_.-]){_NAMES}(?:$|[_.-])|_key$|_pass$|_pat$", re.IGNORECASE)
_VALUE = r"(?!\d+(?:\.\d+)?\b|null\b|none\b|true\b|false\b)([^\s\"'\\,;{}\[\]()<>]{6,})"
"""The value beside a name; a number is none."""
_ASSIGNED = re.compile(
    rf"((?<![a-z0-9])(?:[\w.-]*[_.-])?{_NAMES}(?:[_.-][\w.-]*)?\\?[\"']?\s*[:=]\s*\\?[\"']?){_VALUE}",
    re.IGNORECASE,
)
_OPTION = re.compile(
    # As a shell, a list in JSON and one in YAML have an option and its value.
    rf"(--?(?:[\w-]*-)?{_NAMES}(?:-[\w-]*)?(?:[\s\"',\\]|- )+){_VALUE}",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?<=://)([^/\s:@\"']*:)([^/\s@\"']+)(?=@)")
_KNOWN = re.compile(
    rf"{PRIVATE_KEY}-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    # Also one that was cut: too much is replaced rather than too little.
    rf"|\b(?:{'|'.join(KEY_FORMS)})[\w-]{{12,}}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?<=Bearer )[\w.~+/=-]{8,}",
    re.DOTALL,
)
_OTHER_HOME = re.compile(r"(/(?:home|Users)/)[^/\s\"':,]+")
LEAST_CHARACTERS = 4
"""Length of a value from which on it is replaced wherever it is."""


def is_secret_name(name: str) -> bool:
    """Return whether a variable with this name probably holds a secret."""
    return _SECRET_NAME.search(name) is not None


class Redactor:
    """Replaces secrets and paths, and counts what it has replaced."""

    def __init__(self, variables: Mapping[str, str], folders: Mapping[str, str]) -> None:
        """``variables`` are those of the program, of which the values with the names of secrets are
        replaced; ``folders`` are paths and what replaces them, the longest first."""
        self.replaced: Counter[str] = Counter()
        self._words: list[tuple[str, str, str]] = []
        for name, value in variables.items():
            if is_secret_name(name) and len(value) >= LEAST_CHARACTERS:
                forms = {value, json.dumps(value)[1:-1], quote(value, safe="")}
                self._words += [(form, f"[{name}]", f"the value of {name}") for form in forms]
        # A value may contain another one.
        self._words.sort(key=lambda word: -len(word[0]))
        for path, instead in sorted(folders.items(), key=lambda item: -len(item[0])):
            if len(path.rstrip("/")) > 1:
                self._words.append((path.rstrip("/"), instead, f"the folder {instead}"))

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        for word, instead, what in self._words:
            if word in text:
                self.replaced[what] += text.count(word)
                text = text.replace(word, instead)
        text = self._sub(_KNOWN, "[key]", "keys of a known form", text)
        text = self._sub(_PASSWORD, r"\1[password]", "passwords in addresses", text)
        text = self._sub(_ASSIGNED, r"\1[secret]", "values beside the names of secrets", text)
        text = self._sub(_OPTION, r"\1[secret]", "values beside the names of secrets", text)
        return self._sub(_OTHER_HOME, r"\1user", "names of home folders", text)

    def _sub(self, pattern: re.Pattern[str], instead: str, what: str, text: str) -> str:
        text, count = pattern.subn(instead, text)
        if count:
            self.replaced[what] += count
        return text
