"""Sharded checkpoints: folders of torch.distributed.checkpoint, written by two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ltui.training.store.run_checkpoints import checkpoint_to_resume, damage_of

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"


@pytest.mark.timeout(600)
def test_a_damaged_sharded_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(tmp_path.glob(".*.part"))
    info = checkpoint_to_resume(tmp_path)
    assert info is not None
    assert info.weights == "finite"
    path = Path(info.path)
    shards = sorted(path.glob("*.distcp"))
    assert len(shards) == 2
    # Read by one process, whatever number wrote it.
    state = {"rows": torch.zeros(10, 4), "step": torch.tensor(0)}
    load(state, checkpoint_id=path)
    assert torch.equal(state["rows"], torch.arange(40.0).reshape(10, 4))
    assert int(state["step"]) == info.global_step == 7

    data = bytearray(shards[1].read_bytes())
    data[len(data) // 2] ^= 1
    shards[1].write_bytes(data)
    assert "different checksum" in str(damage_of(info))
    shards[1].unlink()
    assert "is gone" in str(damage_of(info))
    assert checkpoint_to_resume(tmp_path) is None
