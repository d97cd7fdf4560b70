"""Offer of the head to a machine that joins, and what both sides compare before it runs.

The training interpreter is asked for its versions without importing torch.

Messages by which a machine asks the head for a place in a run, before it has an agent.

``ltui join`` sends a ``JoinRequest``. The head answers with a ``JoinOffer``, which contains the
specification of the run, or with a ``JoinRefusal``. A machine that cannot run the specification
sends a ``JoinDecline``; otherwise it starts its agent, whose first report takes the place. A
message is one JSON frame behind the frame ``JOIN``, which tells it from the report of an agent.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import parse_json
from ltui.training.nodes.messages import Orders
from ltui.training.process.python_command import program_command
from ltui.training.store.spec_file import spec_text

JOIN = b"ltui-join"
"""First frame of every message of this module."""
JOIN_VERSION = 1
"""Version of these messages. It changes when a field changes its meaning."""


class JoinRequest(Struct, tag_field="kind", tag="request", frozen=True, kw_only=True):
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


class JoinOffer(Struct, tag_field="kind", tag="offer", frozen=True, kw_only=True):
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


class JoinRefusal(Struct, tag_field="kind", tag="refusal", frozen=True, kw_only=True):
    """The head refuses the machine."""

    what: str
    """One sentence that says why."""
    remedy: str | None = None


class JoinDecline(Struct, tag_field="kind", tag="decline", frozen=True, kw_only=True):
    """A machine returns the place that it was offered."""

    node: int
    host: str
    machine: str
    reason: str
    """One sentence that says why the machine cannot run the specification."""


JoinMessage: TypeAlias = JoinRequest | JoinOffer | JoinRefusal | JoinDecline


def encode_join(message: JoinMessage) -> list[bytes]:
    """Return the frames of a message."""
    document = {"join_version": JOIN_VERSION, **to_builtins(message)}
    return [JOIN, json.dumps(document).encode()]


def is_join(frames: Sequence[bytes]) -> bool:
    """Return True if the frames are a message of this module, perhaps of another version."""
    return bool(frames) and frames[0] == JOIN


def decode_join(frames: Sequence[bytes]) -> JoinMessage:
    """Return the message. Raise ``ValueError`` with a reason if it is none of this version."""
    try:
        document = parse_json(frames[1]) if len(frames) == 2 and is_join(frames) else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ValueError("the message is damaged")
    if document.get("join_version") != JOIN_VERSION:
        raise ValueError(
            f"it is of version {document.get('join_version')!s:.20} of the messages of "
            f"`ltui join`, and this ltui uses version {JOIN_VERSION}"
        )
    try:
        message: JoinMessage = convert(document, JoinMessage)
        return message
    except ValidationError as error:
        raise ValueError(f"the message has a wrong value ({error!s:.100})") from error


_PROBE = """
import importlib.metadata as m, json, sys
versions = {"python": "%d.%d" % sys.version_info[:2]}
for name in ("torch", "lightning", "pytorch-lightning"):
    try:
        versions[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""
_PROBE_S = 30.0
"""Seconds to wait for the training interpreter."""
_PARTS_COMPARED = {"python": 2, "torch": 2, "lightning": 2, "pytorch-lightning": 2}
"""Package -> numbers of its version that must be equal on all nodes."""


def training_versions(spec: RunSpec, python: str | None = None) -> dict[str, str]:
    """Return the versions of Python, torch and Lightning in the training interpreter.

    They are empty for a command of the user, and if the interpreter does not answer. ``python``
    replaces the interpreter of the specification.
    """
    if spec.command is not None:
        return {}
    try:
        answer = subprocess.run(
            program_command(_PROBE, python=python or spec.python),
            cwd=spec.cwd,
            env={**os.environ, **spec.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=True,
        )
        document = json.loads(answer.stdout.strip().split("\n")[-1])
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {str(name): str(version) for name, version in document.items()}


def version_difference(head: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return the first difference in words; None if the versions fit together.

    A package that only one side has is no difference: a missing one is reported by other checks.
    """
    for name, count in _PARTS_COMPARED.items():
        if name in head and name in here:
            first, second = (v[name].split("+")[0].split(".")[:count] for v in (head, here))
            if first != second:
                return f"{name} is {here[name]} on this machine and {head[name]} on node 0"
    return None


def make_offer(spec: RunSpec, node: int, versions: Mapping[str, str], orders: Orders) -> JoinOffer:
    """Return the offer of the place ``node`` in the run of ``spec``.

    ``orders`` are those of an agent that has not reported yet.
    """
    assert spec.nodes is not None
    own = spec.with_changes(nodes=replace(spec.nodes, rank=node))
    return JoinOffer(
        run_id=spec.id,
        node=node,
        spec=spec_text(own),
        versions=dict(versions),
        files=tuple(dict.fromkeys(_named_files(spec))),
        head=socket.gethostname(),
        attempt=orders.attempt,
        resume_from=orders.resume_from,
        resume_step=orders.resume_step,
        changes=orders.changes,
    )


def missing_files(offer: JoinOffer, cwd: str) -> list[str]:
    """Return the files and folders of the offer that do not exist on this machine."""
    return [name for name in offer.files if not os.path.exists(os.path.join(cwd, name))]


def _named_files(spec: RunSpec) -> Iterator[str]:
    """Return the files and filled folders that exist here and that the model or data names.

    An empty or missing folder may be one that the training creates.
    """
    config = spec.config or {}
    for text in _texts([config.get("model"), config.get("data")]):
        if os.sep not in text or len(text) > 4096 or "\0" in text:
            continue
        path = Path(spec.cwd, text)
        try:
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                yield text
        except OSError:
            continue


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
