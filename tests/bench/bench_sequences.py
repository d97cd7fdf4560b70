"""A dataset four times as large as the memory that its reader may have of its own, read at random.

The reader's own memory is limited by RLIMIT_DATA, which needs no rights and counts heap and private
maps. Pages of files mapped for reading are not its own: the most that was resident of them is the
row with the bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.row import Row, row

LIMIT = 256 << 20
RESIDENT = 64 << 20

_WRITE = """
import sys, time
import numpy as np
from ltui.training.data.sequence_writer import SequenceWriter

random, left = np.random.default_rng(0), int(sys.argv[2])
values = random.normal(size=(3000, 64)).astype(np.float32)
began, written = time.perf_counter(), 0
with SequenceWriter(sys.argv[1], columns=64, shard_bytes=1 << 28) as out:
    while written < left:
        rows = int(random.integers(100, 3000))
        out.add(values[:rows])
        written += rows * 256
print(written / (time.perf_counter() - began))
"""
_READ = """
import json, resource, sys, time
import numpy as np
from ltui.training.data.sequence_dataset import SequenceDataset

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

own = status("VmData") + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (own, own))
dataset = SequenceDataset(sys.argv[1], resident_bytes=int(sys.argv[3]), check=sys.argv[4] == "1")
before, most = status("RssFile"), 0
order = np.random.default_rng(0).permutation(len(dataset)).tolist()
began = time.perf_counter()
for number in order:
    dataset[number].values.sum()
    most = max(most, status("RssFile")) if number % 16 == 0 else most
spent = time.perf_counter() - began
print(json.dumps({"most": most - before, "per_s": len(order) / spent, "bytes": dataset.data_bytes}))
"""


def measure() -> list[Row]:
    """Rows of what, value, unit and bound."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.seq"
        written = float(_run(_WRITE, str(path), str(4 * LIMIT)))
        checked = json.loads(_run(_READ, folder, str(LIMIT), str(RESIDENT), "1"))
        unchecked = json.loads(_run(_READ, folder, str(LIMIT), str(RESIDENT), "0"))
    size = f"{checked['bytes'] >> 20} MiB read by a process with {LIMIT >> 20} MiB of its own"
    return [
        row(f"{size}: most resident of files", checked["most"] / 2**20, "MiB", 3 * RESIDENT >> 20),
        row("samples of 400 kB in random order, checked", checked["per_s"], "samples/s"),
        row("the same, not checked", unchecked["per_s"], "samples/s"),
        row("written", written / 2**20, "MiB/s"),
    ]


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    for measured in measure():
        print(measured)
