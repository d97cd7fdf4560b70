"""Numbers as people read them: ``1 204``, ``31.4 k``, ``12 m 08 s``. Pure; ``None`` is ``n/a``."""

from __future__ import annotations

import math

UNKNOWN = "n/a"


def count(value: float | None) -> str:
    """``1 204``: whole numbers in groups of three."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{int(value):,}".replace(",", " ")


def rate(value: float | None) -> str:
    """``31.4 k``: three significant digits and a decimal prefix."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    magnitude = abs(value)
    for limit, divisor, prefix in ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k")):
        if magnitude >= limit:
            return f"{_three_digits(value / divisor)}{prefix}"
    if magnitude >= 1000:
        return count(round(value))
    return _three_digits(value)


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


def measure(value: float | None) -> str:
    """``0.8421`` or ``3.2e-05``: a metric in four significant digits."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+inf" if value > 0 else "-inf")
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(digits, 6)}f}"
    return f"{value:.2e}"


def percent(share: float | None) -> str:
    """A share of 0 to 1 as ``41 %``."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    return f"{100 * share:.0f} %"


def duration(seconds: float | None) -> str:
    """``8 s``, ``12 m 08 s``, ``3 h 04 m``, ``2 d 03 h``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def age(seconds: float | None) -> str:
    """``12 ms``, ``8.2 s``, ``3 m``: how long ago, in one unit."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} m"
    return f"{seconds / 3600:.0f} h" if seconds < 48 * 3600 else f"{seconds / 86_400:.0f} d"


def coarse_age(seconds: float | None) -> str:
    """``age`` in whole seconds at least, for lists that are read and not watched."""
    if seconds is not None and seconds < 1:
        return "now"
    if seconds is not None and seconds < 10:
        return f"{seconds:.0f} s"
    return age(seconds)


def size(value: float | None) -> str:
    """Bytes in binary units: ``61.2 GiB``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def of_size(used: float | None, total: float | None) -> str:
    """``61.2/141 GiB``: both in the unit of the larger."""
    if used is None or total is None:
        return f"{size(used)}/{size(total)}" if used is not None or total is not None else UNKNOWN
    unit, divisor = "MiB", 1024.0**2
    if total >= 999.5 * divisor:
        unit, divisor = "GiB", 1024.0**3
    return f"{_three_digits(used / divisor)}/{_three_digits(total / divisor)} {unit}"


def progress_bar(share: float | None, cells: int = 10) -> str:
    """``▮▮▮▮▯▯▯▯▯▯``; empty where the share is not known."""
    if share is None:
        return ""
    full = min(cells, max(0, int(share * cells)))
    return "▮" * full + "▯" * (cells - full)
