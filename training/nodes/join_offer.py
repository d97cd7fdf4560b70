"""Offer of the head to a machine that joins, and what both sides compare before it runs.

The training interpreter is asked for its versions without importing torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.nodes.messages import JoinOffer, Orders
from ltui.training.process.python_command import program_command
from ltui.training.store.spec_file import spec_text

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
        plan=orders.plan,
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
