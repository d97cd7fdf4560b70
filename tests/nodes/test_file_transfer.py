"""Files of any size are divided into chunks without a gap."""

from __future__ import annotations

import itertools
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from ltui.training.rank import file_transfer


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 20))
def test_chunks_hold_every_byte_once(sizes: list[int], chunk_bytes: int) -> None:
    with patch.object(file_transfer, "CHUNK_BYTES", chunk_bytes):
        chunks = list(file_transfer._chunks(sizes))
    rebuilt = [0] * len(sizes)
    for number, segments in enumerate(chunks):
        assert segments[0].start == 0
        for before, after in itertools.pairwise(segments):
            assert before.stop == after.start
            assert before.file < after.file
        assert all(segment.start < segment.stop <= chunk_bytes for segment in segments)
        # Only the last chunk is not full.
        assert segments[-1].stop == chunk_bytes or number == len(chunks) - 1
        for segment in segments:
            rebuilt[segment.file] += segment.stop - segment.start
    assert rebuilt == sizes
