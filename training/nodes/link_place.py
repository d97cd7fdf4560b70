"""The file of a run directory that says where the head listens: on node 0 and on every other node.

Node 0 binds the same port again after a restart of its supervisor, because the agents look for it
there.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ltui.training.store.run_directory import RunDir, read_json, write_json


class LinkPlace(NamedTuple):
    """Where the head of a run listens for its agents."""

    address: str
    """Host name or numeric address."""
    port: int


def link_place_path(run_dir: RunDir) -> Path:
    """Return the path of the file."""
    return run_dir.path / "engine" / "link.json"


def write_link_place(run_dir: RunDir, place: LinkPlace) -> None:
    """Write the file. Raises ``OSError``."""
    write_json(link_place_path(run_dir), place._asdict())


def read_link_place(run_dir: RunDir) -> LinkPlace | None:
    """Return the content of the file; None if there is none."""
    document = read_json(link_place_path(run_dir)) or {}
    address, port = document.get("address"), document.get("port")
    if not isinstance(address, str) or not isinstance(port, int):
        return None
    return LinkPlace(address, port)
