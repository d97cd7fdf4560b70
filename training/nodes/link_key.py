"""Key of a run on several machines: only agents that have it may connect to the head.

A key is 32 random bytes. The CURVE secrets of the head and of the agents are derived from it, so
that one line of text is all that a node needs. The key stands in a file (0600) in a folder that the
nodes share, or in the environment variable ``LTUI_NODE_KEY``. It is never printed, and never part
of a command line. Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ltui.training.problem import ProblemError

KEY_VARIABLE = "LTUI_NODE_KEY"
"""Environment variable that holds the text of a key."""
KEY_FILE_NAME = "node.key"
"""Name of a key file, in the run directory or in a shared folder."""

_PREFIX = "ltui-node-key-1-"
_TEXT = re.compile(re.escape(_PREFIX) + r"([A-Za-z0-9_-]{43})")
_BYTES = 32
_FILE_BYTES = 1024
"""Maximum number of bytes that are read of a key file."""


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Shared secret of the nodes of one run. ``repr`` and ``str`` show only its fingerprint."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.secret) == _BYTES

    def __repr__(self) -> str:
        return f"LinkKey(fingerprint={self.fingerprint!r})"

    @property
    def text(self) -> str:
        """Text for a key file or ``LTUI_NODE_KEY``. It must not be printed or logged."""
        return _PREFIX + base64.urlsafe_b64encode(self.secret).decode().rstrip("=")

    @property
    def fingerprint(self) -> str:
        """Eight characters that tell two keys apart and reveal neither of them."""
        return self._derive("fingerprint").hex()[:8]

    @property
    def head_secret(self) -> bytes:
        """CURVE secret key (32 bytes) of the head."""
        return self._derive("head")

    @property
    def agent_secret(self) -> bytes:
        """CURVE secret key (32 bytes) that all agents of the run share."""
        return self._derive("agent")

    @classmethod
    def generate(cls) -> LinkKey:
        """Return a new random key."""
        return cls(secrets.token_bytes(_BYTES))

    @classmethod
    def from_text(cls, text: str, where: str) -> LinkKey:
        """Parse the text of a key. ``where`` is its place, for the error message.

        Raise ``ProblemError`` if it is not a key. The message does not repeat the text.
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ProblemError.of(
                where=where,
                what="this is not the key of a run's nodes, or a part of it is missing.",
                remedy=f"Copy the whole line of {KEY_FILE_NAME} from node 0 of the run.",
            )
        return cls(base64.urlsafe_b64decode(match[1] + "="))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LinkKey | None:
        """Return the key in ``LTUI_NODE_KEY``; None if the variable is unset or empty."""
        text = environ.get(KEY_VARIABLE, "").strip()
        return cls.from_text(text, KEY_VARIABLE) if text else None

    @classmethod
    def find(cls, path: Path | None, environ: Mapping[str, str]) -> LinkKey:
        """Return the key in the environment, or else the one in the file ``path``.

        Raise ``ProblemError`` if there is neither, or if the key that comes first is unusable.
        """
        key = cls.from_environment(environ)
        if key is not None:
            return key
        if path is None:
            raise ProblemError.of(
                where=KEY_VARIABLE,
                what="the key of the run's nodes is missing.",
                remedy=f"Set {KEY_VARIABLE} to the line in {KEY_FILE_NAME} of node 0, or name a "
                "copy of that file.",
            )
        return cls.read(path)

    @classmethod
    def read(cls, path: Path) -> LinkKey:
        """Read a key file. Raise ``ProblemError`` if other users can read or replace it."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                _check_private(path, os.fstat(file.fileno()))
                data = file.read(_FILE_BYTES)
        except OSError as error:
            raise ProblemError.of(
                where=str(path),
                what=f"the key of the run's nodes cannot be read ({error.strerror or error}).",
                remedy=f"Copy {KEY_FILE_NAME} from node 0 of the run (mode 0600), or set "
                f"{KEY_VARIABLE}.",
            ) from error
        return cls.from_text(data.decode("ascii", "replace"), str(path))

    @classmethod
    def read_or_create(cls, path: Path) -> LinkKey:
        """Return the key in ``path``; first create the file with a new key if it does not exist.

        If several processes call this at the same time, all return the same key.
        """
        if not os.path.lexists(path):
            try:
                _create(path, cls.generate())
            except OSError as error:
                raise ProblemError.of(
                    where=str(path),
                    what=f"the key of the run's nodes cannot be written ({error.strerror}).",
                    remedy=f"Free the path, or set {KEY_VARIABLE} on every node.",
                ) from error
        return cls.read(path)

    def _derive(self, purpose: str) -> bytes:
        """Return 32 bytes that depend on the key and the purpose (HMAC as in HKDF's expansion)."""
        return hmac.digest(self.secret, f"ltui link 1 {purpose}".encode(), hashlib.sha256)


def _check_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ProblemError.of(
            where=str(path), what="this is not a file.", remedy=f"Name a {KEY_FILE_NAME}."
        )
    if status.st_uid != os.geteuid() and os.geteuid() != 0:
        raise ProblemError.of(
            where=str(path),
            what="the key of the run's nodes belongs to another user.",
            remedy="Copy the file, so that the copy is yours, and name the copy.",
        )
    # The bits of the group also hold the mask of an access control list.
    if status.st_mode & 0o077:
        raise ProblemError.of(
            where=str(path),
            what="other users can read the key of the run's nodes "
            f"(mode {stat.S_IMODE(status.st_mode):04o}).",
            remedy=f"Run `chmod 600` on it. If its file system has no modes, set {KEY_VARIABLE}.",
        )


def _create(path: Path, key: LinkKey) -> None:
    """Write the whole key under a temporary name (0600), then give it its name."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(key.text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link never replaces the key of a process that was faster.
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
