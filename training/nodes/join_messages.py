"""Messages by which a machine asks the head for a place in a run, before it has an agent. Pure.

``ltui join`` sends a ``JoinRequest``. The head answers with a ``JoinOffer``, which contains the
specification of the run, or with a ``JoinRefusal``. A machine that cannot run the specification
sends a ``JoinDecline``; otherwise it starts its agent, whose first report takes the place. A
message is one JSON frame behind the frame ``JOIN``, which tells it from the report of an agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

JOIN = b"ltui-join"
"""First frame of every message of this module."""
JOIN_VERSION = 1
"""Version of these messages. It changes when a field changes its meaning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A machine asks to become a node of the run."""

    version: str
    """Version of ltui on the machine."""
    host: str
    """Host name of the machine."""
    machine: str
    """Text that tells this machine and its ``$LTUI_HOME`` from all others, also after a restart of
    ltui."""
    pid: int
    node: int | None = None
    """Number of the node that it wants to be; None for the lowest free number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOffer:
    """The head offers a place: the number of a node, and what to run."""

    run_id: str
    node: int
    spec: str
    """Specification of the run as YAML, with ``nodes.rank`` of this node."""
    versions: Mapping[str, str]
    """Versions of Python, torch and Lightning in the head's training interpreter."""
    files: tuple[str, ...] = ()
    """Files and folders that the configuration names and that exist on the head."""
    head: str = ""
    """Host name of the head."""
    attempt: int = 1
    """Number of the attempt that the head runs."""
    resume_from: str | None = None
    """Path on the head of the checkpoint from which the attempt resumes."""
    resume_step: int | None = None
    changes: tuple[str, ...] = ()
    """Overrides that are new in this attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRefusal:
    """The head refuses the machine."""

    what: str
    """One sentence that says why."""
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinDecline:
    """A machine returns the place that it was offered."""

    node: int
    host: str
    machine: str
    reason: str
    """One sentence that says why the machine cannot run the specification."""


JoinMessage: TypeAlias = JoinRequest | JoinOffer | JoinRefusal | JoinDecline
_KINDS: Mapping[str, type[JoinMessage]] = {
    "request": JoinRequest,
    "offer": JoinOffer,
    "refusal": JoinRefusal,
    "decline": JoinDecline,
}
_OPTIONAL = {
    (JoinRequest, "node"),
    (JoinOffer, "resume_from"),
    (JoinOffer, "resume_step"),
    (JoinRefusal, "remedy"),
}
"""Fields that may be None."""


def encode_join(message: JoinMessage) -> list[bytes]:
    """Return the frames of a message."""
    kind = next(name for name, type_ in _KINDS.items() if isinstance(message, type_))
    document = {"kind": kind, "join_version": JOIN_VERSION, **asdict(message)}
    return [JOIN, json.dumps(document).encode()]


def is_join(frames: Sequence[bytes]) -> bool:
    """Return True if the frames are a message of this module, perhaps of another version."""
    return bool(frames) and frames[0] == JOIN


def decode_join(frames: Sequence[bytes]) -> JoinMessage:
    """Return the message. Raise ``ValueError`` with a reason if it is none of this version."""
    try:
        document = json.loads(frames[1]) if len(frames) == 2 and is_join(frames) else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ValueError("the message is damaged")
    if document.get("join_version") != JOIN_VERSION:
        raise ValueError(
            f"it is of version {document.get('join_version')!s:.20} of the messages of "
            f"`ltui join`, and this ltui uses version {JOIN_VERSION}"
        )
    type_ = _KINDS.get(str(document.get("kind")))
    if type_ is None:
        raise ValueError("the message is of an unknown kind")
    values = {f.name: document[f.name] for f in fields(type_) if f.name in document}
    try:
        return _checked(type_, values)
    except TypeError as error:
        raise ValueError("the message lacks a value") from error


def _checked(type_: type[JoinMessage], values: dict[str, Any]) -> JoinMessage:
    """Return the message of ``values``. Raise ``ValueError`` for a value of a wrong type."""
    for name, value in values.items():
        if name == "versions":
            valid = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        elif name in ("files", "changes"):
            valid = isinstance(value, list) and all(isinstance(v, str) for v in value)
            values[name] = tuple(value) if valid else ()
        elif name in ("pid", "node", "attempt", "resume_step"):
            valid = isinstance(value, int) or (value is None and (type_, name) in _OPTIONAL)
        else:
            valid = isinstance(value, str) or (value is None and (type_, name) in _OPTIONAL)
        if not valid:
            raise ValueError(f"the message has a wrong value of {name}")
    return type_(**values)
