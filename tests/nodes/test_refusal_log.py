"""The rate limit of sentences about refused connections."""

from __future__ import annotations

from ltui.training.nodes.link_wire import MAX_PER_MINUTE, REPEAT_S, RefusalLog


def test_one_sentence_a_minute_that_counts_those_between() -> None:
    log = RefusalLog()
    assert log.add("10.0.0.2", "its key is wrong", 5.0) == (
        "A connection from 10.0.0.2 was refused: its key is wrong."
    )
    for n in range(7):
        assert log.add("10.0.0.2", "its key is wrong", 6.0 + n) is None
    assert log.add("10.0.0.2", "its version is old", 6.0) is not None
    assert log.add("10.0.0.3", "its key is wrong", 6.0) is not None
    assert log.add("10.0.0.2", "its key is wrong", 5.0 + REPEAT_S) == (
        "A connection from 10.0.0.2 was refused (7 more times since the last report): "
        "its key is wrong."
    )


def test_many_addresses_do_not_flood_the_log() -> None:
    log = RefusalLog()
    sentences = [log.add(f"10.0.{n // 256}.{n % 256}", "its key is wrong", 1.0) for n in range(999)]
    assert sum(s is not None for s in sentences) == MAX_PER_MINUTE
    assert log.add("10.1.0.0", "its key is wrong", 62.0) is not None


def test_memory_is_bounded() -> None:
    log = RefusalLog()
    for n in range(5000):
        log.add(f"address {n}", "its key is wrong", n * 60.0)
    assert len(log._entries) <= 256
