"""Fixtures of the tests of several machines."""

from __future__ import annotations

from tests.nodes.two_homes import two_homes as two_homes
from tests.nodes.two_machines import two_machines as two_machines
