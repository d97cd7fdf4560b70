"""``docs/configuration.md`` and ``docs/protocols.md`` list exactly what the code reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import NODEFAULT
from msgspec.structs import fields

from ltui.app.config_file import SECTIONS
from ltui.app.user_config import SETTINGS
from ltui.training.config.ltui_section import Knob, LtuiSection, read_section
from ltui.training.config.run_spec import CheckpointPolicy, StallPolicy

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "configuration.md"
PROTOCOLS = ROOT / "docs" / "protocols.md"
VARIABLE = re.compile(r"(?<![A-Za-z0-9_])LTUI_[A-Z0-9_]*[A-Z0-9](?![A-Za-z0-9_])")
"""A complete name; ``LTUI_RUN_``, the beginning of several names, is none."""
LANGUAGES = {".py", ".c", ".h"}


def table_rows(text: str, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each table row below ``heading``, up to the next heading of its level."""
    level = heading.partition(" ")[0]
    lines = iter(text.splitlines())
    assert heading in text.splitlines(), f"there is no heading {heading!r}"
    for line in lines:
        if line == heading:
            break
    for line in lines:
        depth = line.partition(" ")[0]
        if depth and set(depth) == {"#"} and len(depth) <= len(level):
            return
        if line.startswith("|") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def names_below(text: str, heading: str) -> list[str]:
    """Return the names in code quotes in the first column of the tables below ``heading``."""
    return [name for row in table_rows(text, heading) for name in re.findall(r"`([^`]+)`", row[0])]


def variables_in_code() -> set[str]:
    """Return every ``LTUI_*`` name in a string of the shipped code (docstrings left out)."""
    names: set[str] = set()
    for folder in ("app", "training", "widgets"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py":
                for text in strings_of(ast.parse(path.read_text(encoding="utf-8"))):
                    names.update(VARIABLE.findall(text))
            elif path.suffix in LANGUAGES:
                variables = re.findall(r'getenv\("([^"]+)"\)', path.read_text(encoding="utf-8"))
                names.update(name for name in variables if VARIABLE.fullmatch(name))
    return names


def strings_of(tree: ast.Module) -> Iterator[str]:
    """Yield every string constant that is not a statement of its own (a docstring)."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str):
            yield node.value


def keys_in_code() -> dict[str, Any]:
    """Return each key of the ``ltui:`` section with its default (``...`` where it has none)."""
    keys = {field.name: default_of(field) for field in fields(LtuiSection)}
    for name, policy in (("stall", StallPolicy), ("checkpoint", CheckpointPolicy)):
        keys[name] = {}
        keys |= {f"{name}.{field.name}": default_of(field) for field in fields(policy)}
    for field in fields(Knob):
        if field.name != "default":  # the value in the document; not a key
            keys[f"knobs[].{field.name}"] = default_of(field)
    return keys


def default_of(field: Any) -> Any:
    if field.default is not NODEFAULT:
        return list(field.default) if isinstance(field.default, tuple) else field.default
    return ...


def is_accepted(key: str) -> bool:
    """Return whether the parser knows ``key``: a wrong value is fine, an unknown key is not."""
    impossible = object()
    if key.startswith("knobs[]."):
        value: dict[str, Any] = {"knobs": [{"key": "trainer.x", key[8:]: impossible}]}
    elif "." in key:
        section, name = key.split(".")
        value = {section: {name: impossible}}
    else:
        value = {key: impossible}
    _, faults = read_section(value)
    assert faults, f"{key} accepts anything"
    return not any("unknown key" in fault.what for fault in faults)


def test_every_key_of_the_section_is_described_and_nothing_else_is() -> None:
    described = names_below(REFERENCE.read_text(encoding="utf-8"), "## The `ltui:` section")
    documented = [row[0].strip("`") for row in section_rows()]
    assert len(documented) == len(set(documented))
    assert set(documented) == set(keys_in_code())
    assert set(documented) <= set(described)


def test_every_setting_of_the_configuration_file_is_described() -> None:
    rows = {
        row[0].strip("`"): row
        for row in table_rows(REFERENCE.read_text(encoding="utf-8"), "## The configuration file")
        if row[0].startswith("`")
    }
    assert list(rows) == [*SETTINGS, *SECTIONS]
    for path, setting in SETTINGS.items():
        if setting.default is not None:
            assert rows[path][2] == f"`{setting.default}`"
        for choice in setting.choices:
            assert f"`{choice}`" in rows[path][1]


def section_rows() -> list[list[str]]:
    rows = table_rows(REFERENCE.read_text(encoding="utf-8"), "## The `ltui:` section")
    return [row for row in rows if row[0].startswith("`")]


@pytest.mark.parametrize("key", sorted(keys_in_code()))
def test_the_parser_knows_each_key(key: str) -> None:
    assert is_accepted(key)


def test_a_wrong_key_would_be_noticed() -> None:
    assert not is_accepted("titel")
    assert not is_accepted("stall.flour_s")
    assert not is_accepted("knobs[].lable")


def test_the_defaults_are_those_of_the_code() -> None:
    defaults = keys_in_code()
    checked = 0
    for row in section_rows():
        key, shown = row[0].strip("`"), row[2]
        if not shown.startswith("`"):
            continue  # a default in words
        assert yaml.safe_load(shown.strip("`")) == defaults[key], key
        checked += 1
    assert checked >= 5


def test_every_row_has_all_columns() -> None:
    rows = section_rows()
    assert rows
    assert all(len(row) == 5 and row[1] and row[4] for row in rows)
    seconds = [row for row in rows if row[0].endswith("_s`")]
    assert seconds
    assert all(row[3] == "seconds" for row in seconds)


def test_every_variable_is_described_once_and_nothing_else_is() -> None:
    reference = REFERENCE.read_text(encoding="utf-8")
    public = names_below(reference, "### Variables that you may set")
    hook = names_below(reference, "### Variables that the `on_verdict` command receives")
    internal = names_below(
        PROTOCOLS.read_text(encoding="utf-8"), "## Environment of ltui's processes"
    )
    ours = [n for n in (*public, *hook, *internal) if n.startswith("LTUI_")]
    assert len(ours) == len(set(ours))
    assert set(ours) == variables_in_code()


def test_a_string_with_a_variable_would_be_noticed() -> None:
    tree = ast.parse('"""About LTUI_DOC."""\nprint("$LTUI_HOME/x", {"LTUI_A_B": 1}, "LTUI_RUN_")')
    names = {name for text in strings_of(tree) for name in VARIABLE.findall(text)}
    assert names == {"LTUI_HOME", "LTUI_A_B"}
