"""Fixtures of the tests of several machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nodes.two_homes import two_homes as two_homes
from tests.nodes.two_machines import two_machines as two_machines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the slow tests of this folder to ``make nodes``: together they take half an hour."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.nodes)
