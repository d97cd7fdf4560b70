"""Read a queue to its end and print a hash of each tensor in it, as JSON.

python -m tests.gpu.hardware.queue_digests QUEUE
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from ltui.training.tensor_queue.queue_reader import QueueReader

MODULE = "tests.gpu.hardware.queue_digests"
END = b"end"
"""Label of the last record."""


def describe(dtype: str, shape: tuple[int, ...], data: bytes) -> str:
    """Return a text that two tensors share only if their type, shape and bytes are the same."""
    return f"{dtype} {shape} {hashlib.sha256(data).hexdigest()}"


def main() -> None:
    """Print the records and how many were missed."""
    reader = QueueReader(Path(sys.argv[1]), from_seq=0)
    records: list[tuple[str, str]] = []
    missed = 0
    while True:
        poll = reader.poll()
        missed += poll.missed
        for record in poll.records:
            if record.label == END:
                print(json.dumps({"records": records, "missed": missed}))
                return
            text = describe(record.dtype, record.shape, record.payload)
            records.append((record.label.decode(), text))
        time.sleep(0.005)


if __name__ == "__main__":
    main()
