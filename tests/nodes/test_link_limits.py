"""How often agents report, by the number of machines."""

from __future__ import annotations

import pytest

from ltui.training.nodes.messages import readings_period_s, report_period_s
from ltui.training.nodes.node_watch import SILENT_AFTER_S


def test_two_machines_report_four_times_a_second() -> None:
    assert report_period_s(2, urgent=False) == 0.25
    assert report_period_s(2, urgent=True) < 0.05
    assert readings_period_s(2) == 1.0


@pytest.mark.parametrize("nodes", [2, 32, 128, 2000])
def test_a_machine_that_misses_one_report_is_not_silent(nodes: int) -> None:
    for urgent in (False, True):
        assert 2 * report_period_s(nodes, urgent=urgent) < SILENT_AFTER_S


def test_many_machines_report_less_often() -> None:
    assert 128 / report_period_s(128, urgent=False) <= 128
    assert 128 / report_period_s(128, urgent=True) <= 700
