"""Run directories of forked ranks that believe to be on several machines."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from ltui.training.rank import node_folders
from tests.rank.exactness.world import HERE


def share_queues(head: Path, other: Path) -> None:
    """Make the queue folder of ``head`` that of ``other``, as if tables were mirrored at once."""
    (head / "queue").mkdir(parents=True, exist_ok=True)
    other.mkdir(exist_ok=True)
    (other / "queue").symlink_to(head / "queue")


def hide_checkpoints(head: Path) -> None:
    """Make the checkpoint folder of ``head`` look empty at its path, except on node 0."""
    original, hidden = node_folders._names, head / "checkpoints"

    def names(folder: Path) -> set[str]:
        return set() if folder == hidden else original(folder)

    if HERE.node:
        patch.object(node_folders, "_names", names).start()
