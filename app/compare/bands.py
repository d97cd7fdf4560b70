"""The mean of several runs with a band around it. Pure, NumPy only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ltui.training.store.curve_reader import FloatArray

BANDS = ("minmax", "std", "stderr", "ci95")
"""Kinds of bands: minimum to maximum, standard deviation, standard error, 95 % interval of the
mean."""
BAND_NAMES = {
    "minmax": "min to max",
    "std": "± standard deviation",
    "stderr": "± standard error",
    "ci95": "95 % interval",
}


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """Mean and band over the runs of a group, for each position."""

    mean: FloatArray
    low: FloatArray
    """NaN where fewer than two runs have a value, unless the band is the range of values."""
    high: FloatArray
    count: FloatArray
    """Number of runs that have a value."""


def band_of(table: FloatArray, kind: str) -> Band:
    """Return mean and band over the rows of ``table`` (runs by positions); NaN is a missing value.

    ``kind`` is one of ``BANDS``. The standard deviation is that of a sample (n - 1); the interval
    is that of the mean by Student's t distribution.
    """
    finite = np.isfinite(table)
    count = finite.sum(axis=0).astype(np.float64)
    known = np.where(count > 0, count, np.nan)
    # Divided first, because the sum of huge numbers is infinite.
    mean = (np.where(finite, table, 0.0) / known).sum(axis=0)
    if kind == "minmax":
        low = np.where(count > 0, np.where(finite, table, np.inf).min(axis=0, initial=np.inf), mean)
        high = np.where(
            count > 0, np.where(finite, table, -np.inf).max(axis=0, initial=-np.inf), mean
        )
        return Band(mean, low, high, count)
    with np.errstate(over="ignore"):
        squares = np.where(finite, table - mean, 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=0) / np.where(count > 1, count - 1, np.nan))
    half = deviation * _factors(count, kind)
    return Band(mean, mean - half, mean + half, count)


def _factors(count: FloatArray, kind: str) -> FloatArray:
    """Return by how much the standard deviation is multiplied for each number of runs."""
    if kind == "std":
        return np.ones(len(count))
    root = np.sqrt(np.where(count > 1, count, np.nan))
    if kind == "stderr":
        return np.asarray(1.0 / root)
    quantiles = [t_quantile(int(n) - 1) if n > 1 else math.nan for n in count]
    return np.array(quantiles, dtype=np.float64) / root


@lru_cache(maxsize=1024)
def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Return t so that ``confidence`` of Student's distribution is between -t and t."""
    low, high = 0.0, 1.0
    while _t_probability(high, freedom) < confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_probability(t: float, freedom: int) -> float:
    """Return the probability between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    if freedom == 1:
        total = 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
