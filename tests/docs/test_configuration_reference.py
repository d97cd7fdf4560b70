"""``docs/configuration.md`` and ``docs/protocols.md`` list exactly what the code reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from msgspec import NODEFAULT
from msgspec.structs import fields

from ltui.app.config_file import SECTIONS
from ltui.app.user_config import SETTINGS
from ltui.training.config.ltui_section import Knob, LtuiSection, read_section
from ltui.training.config.run_spec import CheckpointPolicy, StallPolicy

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
PROTOCOLS = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
VARIABLE = re.compile(r"(?<![A-Za-z0-9_])LTUI_[A-Z0-9_]*[A-Z0-9](?![A-Za-z0-9_])")
"""A complete name; ``LTUI_RUN_``, the beginning of several names, is none."""
LANGUAGES = {".c", ".h"}


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of each table row below ``heading``, up to the next heading of its level.

    Such a row begins with a name in code quotes.
    """
    level, lines = heading.partition(" ")[0], text.splitlines()
    below = lines[lines.index(heading) + 1 :]
    ends = (n for n, line in enumerate(below) if re.match(rf"#{{1,{len(level)}}} ", line))
    rows = [line for line in below[: next(ends, None)] if line.startswith("| `")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def variables_in_code() -> set[str]:
    """Return every ``LTUI_*`` name in a string of the shipped code (docstrings left out)."""
    names: set[str] = set()
    for folder in ("app", "training", "widgets"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py" and "LTUI_" in (source := path.read_text(encoding="utf-8")):
                for text in strings_of(ast.parse(source)):
                    names.update(VARIABLE.findall(text))
            elif path.suffix in LANGUAGES:
                variables = re.findall(r'getenv\("([^"]+)"\)', path.read_text(encoding="utf-8"))
                names.update(name for name in variables if VARIABLE.fullmatch(name))
    return names


def strings_of(tree: ast.Module) -> Iterator[str]:
    """Yield every string constant that is not a statement of its own (a docstring)."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Constant) and isinstance(value, str) and id(node) not in docstrings:
            yield value


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


def test_every_key_of_the_section_is_described_with_its_default_and_unit() -> None:
    rows, defaults = table_rows(REFERENCE, "## The `ltui:` section"), keys_in_code()
    documented = [row[0].strip("`") for row in rows]
    assert len(documented) == len(set(documented))
    assert set(documented) == set(defaults)
    shown = {row[0].strip("`"): row[2].strip("`") for row in rows if row[2].startswith("`")}
    assert len(shown) >= 5  # the others have a default in words
    assert {key: yaml.safe_load(text) for key, text in shown.items()} == {
        key: defaults[key] for key in shown
    }
    assert all(len(row) == 5 and row[1] and row[4] for row in rows)
    assert {row[3] for row in rows if row[0].endswith("_s`")} == {"seconds"}


def test_every_setting_of_the_configuration_file_is_described() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(REFERENCE, "## The configuration file")}
    assert list(rows) == [*SETTINGS, *SECTIONS]
    for path, setting in SETTINGS.items():
        if setting.default is not None:
            is_truth = isinstance(setting.default, bool)
            default = str(setting.default).lower() if is_truth else setting.default
            assert rows[path][2] == f"`{default}`"
        for choice in setting.choices:
            assert f"`{choice}`" in rows[path][1]


def test_the_parser_knows_each_key_and_no_other() -> None:
    assert [key for key in keys_in_code() if not is_accepted(key)] == []
    assert not any(map(is_accepted, ("titel", "stall.flour_s", "knobs[].lable")))


def test_every_variable_is_described_once_and_nothing_else_is() -> None:
    ours = [
        name
        for text, heading in (
            (REFERENCE, "### Variables that you may set"),
            (REFERENCE, "### Variables that the `on_verdict` command receives"),
            (PROTOCOLS, "## Environment of ltui's processes"),
        )
        for row in table_rows(text, heading)
        for name in re.findall(r"`(LTUI_[^`]+)`", row[0])
    ]
    assert len(ours) == len(set(ours))
    assert set(ours) == variables_in_code()
