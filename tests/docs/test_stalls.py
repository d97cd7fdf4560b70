"""``docs/stalls.md`` lists every verdict kind and every fault of the catalogue, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from ltui.training.config.run_spec import VerdictLevel
from ltui.training.state.verdicts import VerdictKind
from tests.faults.catalogue import FAULTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "stalls.md").read_text(encoding="utf-8")


def rows_of(header: str) -> list[list[str]]:
    """Return the cells of the rows of the table that begins with ``header``."""
    table = PAGE.split(f"\n{header}", 1)[1].split("\n\n", 1)[0]
    lines = [line for line in table.splitlines()[1:] if not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_kind_is_in_the_table() -> None:
    rows = rows_of("| level | kinds |")
    assert [row[0].strip("`") for row in rows] == [level.value for level in VerdictLevel]
    # What is in parentheses explains a kind and may name another level or setting.
    kinds = [k for row in rows for k in re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", row[1]))]
    assert sorted(kinds) == sorted(kind.value for kind in VerdictKind)


def test_every_fault_is_in_the_table() -> None:
    titles = [row[0] for row in rows_of("| fault | seconds to the right verdict |")]
    assert sorted(titles) == sorted(fault.title for fault in FAULTS)


def test_the_number_of_faults_is_right() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"each of the {len(FAULTS)} faults below" in PAGE
    assert f"lists {len(FAULTS)} faults" in readme
