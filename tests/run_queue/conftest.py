from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_queue.queued_programs import Programs


@pytest.fixture
def programs(private_home: Path, tmp_path: Path) -> Programs:
    return Programs(private_home, tmp_path)


@pytest.fixture
def two_slots(tmp_path: Path, private_home: Path) -> None:
    """A configuration file with two slots."""
    config = tmp_path / "config" / "ltui" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("queue: {slots: 2}\n")
