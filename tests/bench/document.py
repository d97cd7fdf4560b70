"""Put measured text into ``docs/benchmarks.md``."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"


def write_between(name: str, text: str) -> None:
    """Replace what is between the comments ``NAME: begin`` and ``NAME: end``.

    Raise ``ValueError`` if the document lacks them.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, opened, rest = DOCUMENT.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"{DOCUMENT} lacks {begin} and {end}")
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
