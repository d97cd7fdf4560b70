"""Runs of fake ranks for the tests of the life cycle that need a whole run."""

from __future__ import annotations

from tests.supervise.conftest import runs

__all__ = ["runs"]
