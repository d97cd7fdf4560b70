"""How long checkpoints take, as the next attempt and the next start of a job need to know it."""

from __future__ import annotations

from pathlib import Path

from ltui.training.store.run_checkpoints import CheckpointCatalog
from tests.store.histories import snapshot


def test_the_last_times_are_kept_over_attempts(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(tmp_path)
    assert not catalog.seconds
    for seconds in (90.0, 1, None, 2.5):
        catalog.saved(seconds)
    assert catalog.seconds == (90.0, 1.0, 2.5)
    resumed = CheckpointCatalog(tmp_path, snapshot(checkpoint_seconds=catalog.seconds))
    resumed.saved(3.0)
    assert resumed.seconds == (1.0, 2.5, 3.0), "a single slow one is forgotten"
