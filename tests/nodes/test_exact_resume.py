"""Checkpoints of nodes with one checkpoint folder, or with one each: exact, complete or refused."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ltui.training.rank import file_transfer
from ltui.training.store.run_checkpoints import choose_checkpoint
from tests.run_module import run_module

LIMIT_S = 900
pytestmark = pytest.mark.timeout(LIMIT_S)


def tried(folder: Path, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run ``tests.nodes.exact_resume`` and return its rows."""
    (folder / "cases.json").write_text(json.dumps(cases))
    log = folder / "log.txt"
    code = run_module("tests.nodes.exact_resume", [folder, folder / "cases.json"], log, LIMIT_S)
    assert code == 0, log.read_text(errors="replace")[-4000:]
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return rows


def check_exact(row: dict[str, Any]) -> None:
    """The ranks ended with what a run without a stop has, and only rank 0's folder has files."""
    ranks = range(len(row["codes"]))
    assert row["codes"] == [0 for _ in ranks], row
    assert row["differs"] == [[] for _ in ranks], row
    (name,) = set(row["checkpoint"])
    names = sorted([name, f"{name}.json", *(f"{name}.rank-{rank:05d}" for rank in ranks)])
    case = row["case"]
    shares = {"detached": (), "mixed": (1,)}.get(case["layout"], range(case["nodes"]))
    for node, files in enumerate(row["files"]):
        sees = node == 0 or (node in shares and case["layout"] != "visible")
        assert files == (names if sees else []), row
    (node_of_file,) = row["node_of_file"]
    per_node = case["ranks"] // case["nodes"]
    for rank in ranks:
        # A file that came from another node says so.
        node = 0 if rank // per_node in shares else rank // per_node
        assert node_of_file[f"{name}.rank-{rank:05d}"] == node
    inexact = [text for text in row["texts"]["note"] if "Not exact" in text]
    assert all("inside its workers" in text for text in inexact)


def check_refused(row: dict[str, Any], *words: str) -> None:
    """Every rank ended with the same sentence, which has all ``words``."""
    assert row["codes"] == [3] * len(row["codes"]), row
    (text,) = set(row["error"])
    assert all(word in text for word in words), text
    assert row["files"][1] == []


def check_save_failed(row: dict[str, Any], *words: str) -> None:
    """The stop failed with a text of rank 0, training went on, the last checkpoint is there."""
    check_exact({**row, "texts": {"note": []}})
    texts = row["texts"]["checkpoint_failed"]
    assert all(word in texts[0] for word in (*words, "Training continues")), texts
    assert row["resumable"] == row["checkpoint"][0]


def test_nodes_with_folders_of_their_own(tmp_path: Path) -> None:
    stopped, full = tried(
        tmp_path, [{"workers": 2, "seed": 3}, {"fault": "full disk of the other node"}]
    )
    check_exact(stopped)
    assert any("Node 1 does not see" in text for text in stopped["texts"]["note"])
    check_save_failed(full, "rank 1 on node 1", "No space left on device")


SWAPPED = {"ranks": 3, "nodes": 3, "order": [0, 2, 1]}
EXACT: list[dict[str, Any]] = [
    *({"loader": "plain", "workers": workers, "ranks": 4, "seed": workers} for workers in (0, 2)),
    {"loader": "persistent", "workers": 2, "seed": 5, **SWAPPED},
    *({"loader": loader, "seed": 6} for loader in ("generator", "stateful", "stream", "two")),
    {"loader": "stateful_shuffled", "workers": 2, "seed": 7, **SWAPPED},
    {"loader": "own", "workers": 2, "seed": 8},
    {"loader": "sequences", "seed": 9},
    {"part": "sharded", "seed": 10, "ranks": 4},
    {"part": "sharded", "seed": 11, **SWAPPED},
    {"part": "average", "seed": 12},
    {"layout": "shared", "seed": 13},
    {"layout": "shared", "part": "sharded", "seed": 14},
    {"layout": "visible", "seed": 17, "ranks": 4},
    {"layout": "visible", "part": "sharded", "seed": 18},
    {"layout": "mixed", "seed": 15, "ranks": 3, "nodes": 3},
    {"layout": "mixed", "part": "sharded", "seed": 16, "ranks": 3, "nodes": 3},
    *({"stop": stop} for stop in ("epoch end", "validation", "sanity check", "accumulation")),
]
SAVES: dict[str, tuple[str, ...]] = {
    "full disk of the head": ("No space left on device", "machine-0"),
    "full disk of the other node": ("rank 1 on node 1", "No space left on device", "machine-1"),
    "no space at the head": ("0 MB free",),
    "truncated at the head": ("after it was received",),
    "changed at the head": ("than the file that node 1 sent",),
}
RESUMES: dict[str, tuple[str, ...]] = {
    "missing part": (".ckpt.rank-00001, written by node 1, is missing",),
    "changed part": (".ckpt.rank-00001 has a different checksum than its manifest",),
    "full disk at resume": ("rank 1 on node 1", "No space left on device", "machine-1"),
    "truncated at resume": ("rank 1 on node 1", "after it was received"),
}


@pytest.mark.slow
def test_exact_for_loaders_strategies_and_layouts(tmp_path: Path) -> None:
    for row in tried(tmp_path, EXACT):
        check_exact(row)


@pytest.mark.slow
def test_a_failed_save_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"fault": fault, "part": part} for fault in SAVES for part in ("", "sharded")
    ]
    # On one machine too, the ranks that save a sharded model together must not wait for rank 0.
    cases.append({"fault": "no space at the head", "part": "sharded", "nodes": 1})
    for row in tried(tmp_path, cases):
        check_save_failed(row, *SAVES[row["case"]["fault"]])


@pytest.mark.slow
def test_a_damaged_or_missing_part_is_named(tmp_path: Path) -> None:
    for number, row in enumerate(tried(tmp_path, [{"fault": fault} for fault in RESUMES])):
        check_refused(row, *RESUMES[row["case"]["fault"]])
        # What the supervisor says when it looks for a checkpoint to resume from.
        skipped = choose_checkpoint(tmp_path / str(number) / "machine-0/checkpoints").skipped
        if "part" in row["case"]["fault"]:
            assert f"damaged: {row['checkpoint'][0]}.rank-00001 of rank 1 on node 1" in skipped[0]
        else:
            assert skipped == ()


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_sends(tmp_path: Path) -> None:
    """The other rank ends by itself, and the next attempt resumes exactly and clears up."""
    for row in tried(
        tmp_path, [{"fault": "killed while it sends", "part": part} for part in ("", "sharded")]
    ):
        assert row["codes"] == [3, -signal.SIGKILL]
        assert row["resumable"] is not None
        check_exact(row["next"])


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
