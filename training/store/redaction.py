"""Replace secrets and personal paths in what leaves this machine. Pure.

A secret is the value of a variable with a name such as ``HF_TOKEN``, a value beside such a name in
a document or a text, user names and passwords of addresses, and what has the form of a known kind
of key. ``is_secret_name`` alone decides which names those are. Nobody can find every secret, so
what was replaced is counted and shown, and so are the names.

The process that makes an incident file may not have the environment of the run. So the supervisor,
which has it, stores ``secret_digests``: by them the words of a secret are found, but not made.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any
from urllib.parse import quote, quote_plus

from ltui.training.json_codec import parse_json
from ltui.training.store.secret_files import KEY_FORMS, PRIVATE_KEY

_SECRET_NAME = re.compile(
    r"passw(?:or)?d|passphrase|passcode|secret|credential|cookie|bearer"
    r"|(?:api|access|private|signing|encryption|account|auth|master|license)[_.-]?key"
    r"|token(?=$|[_.-])|(?:^|[_.-])(?:auth(?:orization)?|dsn|pat|sas|webhook_url)(?=$|[_.-])"
    r"|(?:^-*|[.]|(?:user|db|smtp|mysql|pg|redis|login)_)pass$|(?:[_.-]|^-+)pwd$|^-*(?-i:pwd)$"
    r"|(?-i:_(?:KEY|PASS|PAT|PW)$)|^sig$|(?:^|-)signature$",
    re.IGNORECASE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")
_NUMBERS = re.compile(r"pass|pwd|secret|credential", re.IGNORECASE)
"""Names beside which a number is a secret, too; ``max_token`` and ``token_id`` have others."""
_NO_SECRET = frozenset(("", "null", "none", "true", "false", "~", "nan"))
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_HEAD = re.compile(
    # name: value, "name": value, name=value, environ["name"] = value, name => value; in YAML also
    # with the value, but no other name, on the next line
    r"(?<![\w.-])(?P<name>[\w.-]{1,100})"
    r"(?:\\*[\"']?\]?[ \t]*(?:=>|:=|[:=])[ \t]*"
    r"(?:(?:[|>][-+]?[ \t]*)?\r?\n[ \t]+(?![ \t]|[\w.-]+:\s))?|"
    # As a shell, a list of JSON or Python, and one of YAML have an option and its value.
    r"(?P<option>\\*[\"'],\s*|[ \t]+(?=[^-\s])|\r?\n[ \t]*-[ \t]+))"
)
_VALUE = re.compile(
    # Up to the same quote; of a text that was cut, and of an apostrophe, up to the end of the line.
    r"(?P<quote>\\*[\"'])(?P<quoted>[^\n]*?)(?:(?<!\\)(?P=quote)|$)"
    r"|[\[{(][^\n]*?(?:[\]})]|$)[^\s\"']*"
    r"|(?:(?:Bearer|Basic|Token|Digest|ApiKey)[ \t]+)?[^\s\"']+",
    re.IGNORECASE | re.MULTILINE,
)
_ASSIGNED = re.compile(r"([-+~]{0,2}([\w.-]{1,100})=)(.+)", re.DOTALL)
"""A word of a command that is an option or a setting with its value."""
_LINE_BEFORE = re.compile(r"(?:^|\n)[ \t]*(?:-[ \t]+)?\Z")
_CLOSING = ")]}>,;."
_USER = re.compile(
    # Up to the last @ of the part for it; what follows a colon and is no port may have a slash.
    r"(?<=://)(?:[^\s/@:\"'<>]{0,99}:(?!\d{1,5}(?:[/?#\s\"'<>]|$))[^\s\"'<>]{0,512}(?=@)"
    r"|[^\s/\"'<>?#]{1,512}(?=@))"
)
_BLOCK = r"(?: BLOCK)?-----"
_KEY_END = rf"-----END [A-Z ]*PRIVATE KEY{_BLOCK}"
_KNOWN = re.compile(
    # Also a key of which the begin or the end was cut: rather too much than too little.
    rf"(?:{PRIVATE_KEY}{_BLOCK}.*?(?:{_KEY_END}|\Z)|\A(?:(?!{PRIVATE_KEY}{_BLOCK}).)*?{_KEY_END})"
    rf"|\b(?:{'|'.join(KEY_FORMS)})(?:(?=[\w-]*[0-9A-Z])[\w-]{{8,}}|[\w-]{{20,}})"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r"|(?i:(?<=bearer )|(?<=bearer%20))[\w.~+/=-]{8,}",
    re.DOTALL,
)
_LOGIN = re.compile(
    # As netrc, and as an option of curl.
    r"(\blogin\s+\S+\s+password\s+|\bcurl\b[^\n]{0,500}?\s(?:-u|--user)[\s=]\s*[\"']?[^\s:]{1,100}:)"
    r"(?!\[)[^\s\"']+"
)
_ESCAPES = re.compile(
    # Of a terminal: titles, colours, others.
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?"
)
_OTHER_HOME = re.compile(r"(/(?:home|Users)/)[^/\s\"':,]+|(?<![\w.~>-])/root(?![\w-]|\.\w)")
_WORD = re.compile(r"[\w-]+")
_MOST_BETWEEN = 4
"""Characters between two words of one secret, which may be escaped."""
_SHORT, _MOST_CLEAN = 300, 50_000
"""Length and number of the texts of which is remembered that nothing has to be replaced."""
LEAST_CHARACTERS = 4
"""Length of a value from which on it is replaced wherever it is."""
LEAST_OF_LINE = 8
"""Length of a line of a secret with several lines from which on it is replaced alone, too."""
_SECRET = "[secret]"  # noqa: S105 - what is written instead of one
_BESIDE = "values beside the names of secrets"


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a variable, option or key with this name probably holds a secret."""
    return _SECRET_NAME.search(_CAMEL.sub("_", name)) is not None


def _secret_values(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in variables.items():
        # These are everywhere.
        plain = value.lower() in _NO_SECRET or (_NUMBER.fullmatch(value) and len(value) < 6)
        if is_secret_name(name) and len(value) >= LEAST_CHARACTERS and not plain:
            yield name, value


def _forms(value: str) -> set[str]:
    """Return how a value and each of its lines are written: as they are, in JSON, in Python and in
    an address."""
    forms = set[str]()
    # By the first line of a private key, its other lines are found.
    lines = (line.strip() for line in value.splitlines())
    for part in {value, *(x for x in lines if len(x) >= LEAST_OF_LINE and x[:5] != "-----")}:
        escaped = (json.dumps(part, ensure_ascii=plain)[1:-1] for plain in (False, True))
        addresses = quote(part, safe=""), quote(part), quote_plus(part)
        forms |= {part, *escaped, repr(part)[1:-1], *addresses}
    return forms


def secret_digests(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return a new key, and short digests with it of the words of each secret variable.

    With 4 bytes, many words have the same digest, so one does not prove a guess.
    """
    key = os.urandom(16)
    return {
        "key": key.hex(),
        "names": {
            name: [
                [short_digest(key, word) for word in words]
                for words in {tuple(_WORD.findall(form)) for form in _forms(value)}
                if len("".join(words)) >= LEAST_CHARACTERS
            ]
            for name, value in _secret_values(variables)
        },
    }


def short_digest(key: bytes, word: str) -> str:
    """Return 8 hexadecimal digits that nobody finds without ``key``."""
    return blake2b(word.encode("utf-8", "replace"), key=key, digest_size=4).hexdigest()


class Redactor:
    """Replaces secrets and paths, and counts what it has replaced."""

    def __init__(
        self,
        variables: Mapping[str, str],
        folders: Mapping[str, str],
        digests: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """``variables`` are those of the program, of which the values with the names of secrets are
        replaced; ``folders`` are paths and what replaces them, the longest first; ``digests`` are
        documents of ``secret_digests``, of which a damaged one counts as none."""
        self.replaced: Counter[str] = Counter()
        self._words: list[tuple[str, str]] = []
        for name, value in _secret_values(variables):
            self._words += [(form, name) for form in _forms(value)]
        # A value may contain another one.
        self._words.sort(key=lambda word: -len(word[0]))
        self._folders = [
            (re.compile(rf"{re.escape(path.rstrip('/'))}(?![\w-])"), instead)
            for path, instead in sorted(folders.items(), key=lambda item: -len(item[0]))
            if len(path.rstrip("/")) > 1
        ]
        self._masks = {_SECRET, "[key]", *(f"[{name}]" for _, name in self._words)}
        self._clean: set[str] = set()
        """Short texts without secrets: most of a record repeat."""
        self._digests = [found for document in digests if (found := self._read(document))]

    def _read(self, document: Mapping[str, Any]) -> tuple[bytes, dict[str, list[Any]]] | None:
        """Return a key, and below the digest of each first word the names and all digests."""
        try:
            key, found = bytes.fromhex(document["key"]), dict[str, list[Any]]()
            for name, forms in document["names"].items():
                self._masks.add(f"[{name}]")
                for words in forms:
                    found.setdefault(words[0], []).append((name, words))
        except (LookupError, TypeError, ValueError, AttributeError):
            return None
        return key, found

    def document(self, value: Any, name: str = "") -> Any:
        """Return a document without secrets. ``name`` is that of the value; below the name of a
        secret, every text is one."""
        if isinstance(value, dict):
            return {
                self.text(key) if isinstance(key, str) else key: self.document(
                    inner, name if is_secret_name(name) else str(key)
                )
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            if all(isinstance(each, str) for each in value):
                # The lines of a log: a key may have several.
                lines = "\n".join(value)
                value = self.text(lines).split("\n") if "PRIVATE KEY" in lines else value
            return [
                self.document(inner, self._name_in(value, at, name))
                for at, inner in enumerate(value)
            ]
        if isinstance(value, bool) or value is None:
            return value
        if is_secret_name(name):
            return self._beside(value, name)
        if not isinstance(value, str):
            return value
        setting = _ASSIGNED.fullmatch(value)
        if setting is not None and is_secret_name(setting[2]):
            return setting[1] + self._beside(setting[3], setting[2])
        return self.text(value)

    def _name_in(self, values: Sequence[Any], at: int, name: str) -> str:
        """Return the name of one value of a list: also that of the option before it."""
        before, value = values[at - 1] if at else None, values[at]
        if is_secret_name(name) or not isinstance(before, str) or not before.startswith("-"):
            return name
        is_option = isinstance(value, str) and value.startswith("--")
        return name if "=" in before or is_option or " " in before else before

    def _beside(self, value: Any, name: str) -> Any:
        """Return what is written instead of a value beside the name of a secret."""
        text = str(value)
        is_number = _NUMBER.fullmatch(text) is not None and _NUMBERS.search(name) is None
        if text in self._masks or text.lower() in _NO_SECRET or is_number:
            return value
        self.replaced[_BESIDE] += 1
        return _SECRET

    def json(self, text: str) -> str:
        """Return a text that may be JSON without secrets; what is none as other texts."""
        if text[:1] in ("{", "["):
            try:
                return json.dumps(self.document(parse_json(text)))
            except ValueError:
                pass
        return self.text(text)

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        if text in self._clean:
            return text
        redacted = self._redacted(text)
        if redacted == text and len(text) < _SHORT and len(self._clean) < _MOST_CLEAN:
            self._clean.add(text)
        return redacted

    def _redacted(self, text: str) -> str:
        text = _ESCAPES.sub("", text)  # They may be between a name and its value.
        for word, name in self._words:
            if word in text:
                self.replaced[f"the value of {name}"] += text.count(word)
                text = text.replace(word, f"[{name}]")
        for key, found in self._digests:
            text = self._without_digests(text, key, found)
        text = self._sub(_KNOWN, "[key]", "keys of a known form", text)
        text = self._sub(_USER, "[user]", "users and passwords in addresses", text)
        text = self._sub(_LOGIN, rf"\1{_SECRET}", _BESIDE, text)
        text = self._without_named(text)
        for folder, instead in self._folders:
            text = self._sub(folder, instead, f"the folder {instead}", text)
        return self._sub(_OTHER_HOME, _home, "names of home folders", text)

    def _without_named(self, text: str) -> str:
        """Replace the values beside the names of secrets."""
        parts, done = [], 0
        for head in _HEAD.finditer(text):
            name, option = head["name"], head["option"]
            if head.start() < done or not is_secret_name(name):
                continue
            if option is not None and not name.startswith("-"):
                continue
            if (value := _VALUE.match(text, head.end())) is None:
                continue
            begin, end = value.span("quoted" if value["quote"] else 0)
            if value["quote"] is None:
                # A line with nothing but a name and a value, as in YAML, has it up to its end.
                before = text[max(0, head.start() - 40) : head.start()]
                if option is None and re.search(r":\s", head[0]) and _LINE_BEFORE.search(before):
                    line_end = text.find("\n", begin)
                    end = line_end if line_end >= 0 else len(text)
                end = begin + len(text[begin:end].rstrip().rstrip(_CLOSING))
                if f"{text[begin:end]}]" in self._masks:
                    continue
            parts += [text[done:begin], self._beside(text[begin:end], name)]
            done = end
        return "".join([*parts, text[done:]])

    def _without_digests(self, text: str, key: bytes, found: Mapping[str, list[Any]]) -> str:
        """Replace the secrets whose words have the digests."""
        words = list(_WORD.finditer(text))
        known: dict[str, str] = {}
        parts, done = [], 0

        def digest(at: int) -> str:
            word = words[at][0]
            if word not in known:
                known[word] = short_digest(key, word)
            return known[word]

        for at, word in enumerate(words):
            if word.start() < done:
                continue
            for name, digests in found.get(digest(at), ()):
                last = at + len(digests) - 1
                if last < len(words) and all(
                    digest(at + n) == wanted
                    and words[at + n].start() - words[at + n - 1].end() <= _MOST_BETWEEN
                    for n, wanted in enumerate(digests[1:], 1)
                ):
                    self.replaced[f"the value of {name}"] += 1
                    parts += [text[done : word.start()], f"[{name}]"]
                    done = words[last].end()
                    break
        return "".join([*parts, text[done:]])

    def _sub(self, pattern: re.Pattern[str], instead: Any, what: str, text: str) -> str:
        text, count = pattern.subn(instead, text)
        if count:
            self.replaced[what] += count
        return text


def _home(found: re.Match[str]) -> str:
    return f"{found[1]}user" if found[1] else "~"
