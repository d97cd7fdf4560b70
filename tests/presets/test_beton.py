"""FFCV gives exactly the samples asked for, in the order asked for, epoch after epoch."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_PROGRAM = """
import sys
from pathlib import Path
import torch
from ltui.training.data.digits import beton_batches, write_beton
from ltui.training.data.digits import load_images

images, labels = load_images()
torch.set_num_threads(3)
path = Path(sys.argv[1]) / "digits.beton"
write_beton(path, images, labels)
written = path.stat().st_mtime_ns
write_beton(path, images, labels)
assert path.stat().st_mtime_ns == written
assert [p.name for p in path.parent.iterdir()] == ["digits.beton"]

assert torch.get_num_threads() == 3
open_batches = beton_batches(path, 16, torch.device("cpu"))
assert torch.get_num_threads() == 3
for order in (list(range(5, 185)), torch.randperm(1798)[:50].tolist(), [1797], [3, 3, 3]):
    # Batches are views of buffers that FFCV uses again.
    got = [(image.clone(), label.clone()) for image, label in open_batches(order)]
    assert torch.equal(torch.cat([image for image, _ in got]), images[order])
    assert torch.equal(torch.cat([label for _, label in got]), labels[order])
    assert [len(label) for _, label in got][:-1] == [16] * (len(got) - 1)
half_read = iter(open_batches(list(range(64))))
next(half_read)
half_read.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ffcv") is None, reason="FFCV is not installed")
def test_samples_come_as_asked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
