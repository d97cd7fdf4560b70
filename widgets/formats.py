"""Numbers, durations and sizes as short text with units.

Pure. A missing value (None, NaN, infinite) becomes ``n/a``. Spaces inside a number are thin spaces
(U+2009), which are one cell wide in a terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection

NA = "n/a"
LOADING = "loading …"
"""Text of a widget that has not been given its content yet."""
THIN = "\N{THIN SPACE}"

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SYMBOLS = frozenset({"B", "B/s", "FLOP"})
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def is_finite(value: float | None) -> bool:
    """Return True if there is a value that is neither NaN nor infinite."""
    return value is not None and math.isfinite(value)


def count(value: float | None) -> str:
    """Format a whole number in groups of three digits: ``1 204``."""
    if value is None or not math.isfinite(value):
        return NA
    return f"{round(value):,}".replace(",", THIN)


def step(value: float | None, total: float | None = None) -> str:
    """Format a step number without groups, as it is typed in a command: ``1204``, ``1204/2930``."""
    if value is None or not math.isfinite(value):
        return NA
    return f"{round(value)}" if total is None else f"{round(value)}/{step(total)}"


def count_of(done: float | None, total: float | None) -> str:
    """Format a count and its total: ``1 204/2 930``; only the count if the total is unknown."""
    return count(done) if total is None else f"{count(done)}/{count(total)}"


def significant(value: float | None, digits: int = 3) -> str:
    """Format ``value`` with significant digits: ``31.4``, ``0.842``, ``1.20e-05``, ``64 200``."""
    if value is None or not math.isfinite(value):
        return NA
    if value == 0:
        return f"{0:.{digits - 1}f}"
    size = math.floor(math.log10(abs(value)))
    # Rounding may give the next power of ten: 9.996 becomes 10.0, not 10.00.
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}")))) if size < 300 else size
    if size < -4 or size >= 9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - size)}f}".replace(",", THIN)


def metric(value: float | None) -> str:
    """Format a logged value with four significant digits; ``NaN``, ``inf`` or ``-inf`` if it is so.

    Every user interface uses this function, so that a value is written in one way.
    """
    if value is None or math.isfinite(value):
        return significant(value, 4)
    return str(float(value)).replace("nan", "NaN")


def quantity(value: float | None, unit: str) -> str:
    """Format three digits with a decimal prefix: ``31.4 k img/s``, ``1.20 MB/s``."""
    if value is None or not math.isfinite(value):
        return NA
    for scale, prefix in _SI:
        # 999.6 would be printed as "1 000", so it already gets the prefix: 1.00 k.
        if abs(value) >= scale * 0.9995:
            # The prefix is joined to the symbol of a unit, and separated from a word.
            gap = "" if unit in _SYMBOLS else " "
            return f"{significant(value / scale)}{THIN}{prefix}{gap}{unit}".rstrip()
    text = f"{value:.0f}" if float(value).is_integer() else significant(value)
    return f"{text} {unit}".rstrip()


def rate(value: float | None, unit: str) -> str:
    """Format a rate as whole numbers below ten thousand: ``9.42``, ``845``, ``1 107``, ``31.4 k``.

    Charts label their axis in the same way, so that a value is recognised there.
    """
    if value is None or not math.isfinite(value):
        return NA
    if 99.5 <= abs(value) < 9999.5:
        return f"{count(value)} {unit}".rstrip()
    return quantity(value, unit)


def size(value: float | None) -> str:
    """Format bytes with a binary unit: ``61.2 GiB``."""
    if value is None or not math.isfinite(value):
        return NA
    scale, unit = _byte_unit(value)
    return f"{_scaled(value, scale)} {unit}"


def size_of(used: float | None, total: float | None) -> str:
    """Format used and total bytes in the unit of the total: ``61.2 / 141 GiB``."""
    if total is None or not math.isfinite(total):
        return size(used)
    scale, unit = _byte_unit(total)
    first = NA if used is None or not math.isfinite(used) else _scaled(used, scale)
    return f"{first} / {_scaled(total, scale)} {unit}"


def _byte_unit(value: float) -> tuple[int, str]:
    return next(((s, u) for s, u in _BINARY if abs(value) >= s * 0.9995), (1, "B"))


def _scaled(value: float, scale: int) -> str:
    return f"{value:.0f}" if scale == 1 else f"{value / scale:.{_decimals(value / scale)}f}"


def _decimals(value: float) -> int:
    if abs(value) < 9.995:
        return 2
    return 1 if abs(value) < 99.95 else 0


def power(value_w: float | None, limit_w: float | None = None) -> str:
    """Format a power and its limit: ``612 / 700 W``."""
    return _with_unit(value_w, limit_w, "W")


def temperature(value_c: float | None) -> str:
    """Format a temperature: ``64 °C``."""
    return _with_unit(value_c, None, "°C")


def clock(value_mhz: float | None) -> str:
    """Format a clock rate: ``1 980 MHz``."""
    return _with_unit(value_mhz, None, "MHz")


def _with_unit(value: float | None, limit: float | None, unit: str) -> str:
    if not is_finite(value) and not is_finite(limit):
        return NA
    return (
        f"{count(value)} / {count(limit)} {unit}" if is_finite(limit) else f"{count(value)} {unit}"
    )


def percent(share: float | None) -> str:
    """Format a fraction as ``41 %``. Less than 1 is never 100 %, and more than 0 is never 0 %."""
    if share is None or not math.isfinite(share * 100):
        return NA
    rounded = round(share * 100)
    if rounded == 100 and share < 1:
        rounded = 99
    if rounded == 0 and share > 0:
        return "<1 %"
    return f"{rounded} %"


def duration(seconds: float | None) -> str:
    """Format a duration in at most two units: ``340 µs``, ``12 ms``, ``8.2 s``, ``3 h 04 m``."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 59.95:
        return _short_duration(seconds)
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60} m {rounded % 60:02d} s"
    minutes = rounded // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} m"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def _short_duration(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.00995 else 0}f} ms"
    return f"{seconds:.1f} s"


def age(seconds: float | None) -> str:
    """Format the time since a change: with tenths below ten seconds (``8.2 s``, ``42 s``)."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    if seconds < 9.95:
        return _short_duration(max(0.0, seconds))
    return f"{round(seconds)} s" if seconds < 59.5 else duration(seconds)


def ago(seconds: float | None) -> str:
    """Format the time since an event in one unit: ``just now``, ``42 s ago``, ``2 h ago``."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    if seconds < 1:
        return "just now"
    for scale, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= scale:
            return f"{int(seconds // scale)} {unit} ago"
    return f"{int(seconds)} s ago"


def time_of_day(at: float, near: float) -> str:
    """Format a unix time: ``03:12:04``, with its date unless ``near`` is on the same day."""
    local = time.localtime(at)
    same_day = local[:3] == time.localtime(near)[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", local)


def ranks(numbers: tuple[int, ...], limit: int = 8) -> str:
    """Format rank numbers: ``0, 1, 3`` or ``0-7, 12``; parts beyond ``limit`` are counted."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        if end - start >= 2:
            parts.append(f"{ordered[start]}-{ordered[end]}")
        else:
            parts.extend(str(n) for n in ordered[start : end + 1])
        start = end + 1
    shown = parts[:limit]
    return ", ".join(shown) + (f" and {len(parts) - limit} more" if len(parts) > limit else "")


def rank_words(numbers: Collection[int]) -> str:
    """Format rank numbers with the word: ``rank 2``; ``ranks 0, 1, 3``."""
    return f"{'rank' if len(set(numbers)) == 1 else 'ranks'} {ranks(tuple(numbers))}"
