"""Synthetic signals to try out sequences: each class is a sum of sines, and lengths vary widely.

A sample has 8 columns (sensors) and 20 to 400 rows (time); most samples are short. The class
determines the frequencies, which all sensors share. Each sensor has its own phase, amplitude and
noise.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ltui.training.data.sequence_format.file_format import DATA_SUFFIX, INDEX_SUFFIX
from ltui.training.data.sequence_writer import SequenceWriter

CLASSES = 8
COLUMNS = 8
SHORTEST, LONGEST = 20, 400
_FREQUENCIES = np.linspace(0.03, 0.35, CLASSES)
_NOISE = 0.5


def signals(samples: int, seed: int) -> Iterator[tuple[npt.NDArray[Any], int]]:
    """Yield samples: (values (rows, 8) float32, label 0 to 7)."""
    random = np.random.default_rng(seed)
    for number in range(samples):
        label = number % CLASSES
        rows = int(SHORTEST + (LONGEST - SHORTEST) * random.beta(1, 4))
        time = np.arange(rows)[:, None]
        low, high = _FREQUENCIES[label], _FREQUENCIES[(label * 3 + 1) % CLASSES]
        phases = random.uniform(0, 2 * np.pi, (2, COLUMNS))
        amplitude = random.uniform(0.5, 1.5, (2, COLUMNS))
        values = amplitude[0] * np.sin(2 * np.pi * low * time + phases[0])
        values += amplitude[1] * np.sin(2 * np.pi * high * time + phases[1])
        values += random.normal(0, _NOISE, values.shape)
        yield values.astype(np.float32), label


def write_signals(path: Path, samples: int, seed: int) -> None:
    """Write signals to ``path`` unless the file exists.

    If several ranks call this, one writes and the others wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(f".{path.stem}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if all(path.with_suffix(s).exists() for s in (DATA_SUFFIX, INDEX_SUFFIX)):
            return
        with SequenceWriter(path, columns=COLUMNS) as out:
            for values, label in signals(samples, seed):
                out.add(values, label)
    finally:
        os.close(lock)
