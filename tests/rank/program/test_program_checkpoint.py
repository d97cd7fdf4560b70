"""The checkpoints of a program: complete, or not there, whatever fails on which rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ltui.training.rank.coordination.save_checkpoint import SaveResult
from ltui.training.rank.program.program_checkpoint import ProgramCheckpoint
from ltui.training.store.run_checkpoints import list_checkpoints, verify


def write_weights(folder: Path) -> None:
    (folder / "weights.txt").write_text("7")


def fail(folder: Path) -> None:
    write_weights(folder)
    raise RuntimeError("the program's disk is full")


def save(
    folder: Path,
    write: Callable[[Path], None] = write_weights,
    agree: Callable[[bool], bool] = bool,
) -> SaveResult:
    checkpoint = ProgramCheckpoint(write, fail, rank=0, world_size=1, all_ranks=False)
    return checkpoint.save(folder, "stop", 12, agree, {"attempt": 1, "fit": 1})


def test_a_checkpoint_is_complete_and_is_loaded_again(tmp_path: Path) -> None:
    torch.manual_seed(5)
    result = save(tmp_path)
    assert result.error is None
    (stored,) = list_checkpoints(tmp_path)
    assert (stored.global_step, verify(stored).ok) == (12, True)
    expected = torch.rand(3)
    loaded: list[str] = []
    other = ProgramCheckpoint(
        fail,
        lambda folder: loaded.append((folder / "weights.txt").read_text()),
        rank=0,
        world_size=1,
        all_ranks=False,
    )
    other.resume(result.path)
    assert loaded == ["7"]
    assert other.resumed is not None
    assert other.resumed.global_step == 12
    assert torch.equal(torch.rand(3), expected), "the random states are those of the checkpoint"


@pytest.mark.parametrize(
    ("write", "reason"),
    [(fail, "RuntimeError: the program's disk is full"), (lambda _: None, "wrote no file")],
)
def test_a_program_that_fails_to_save_leaves_nothing(
    tmp_path: Path, write: Callable[[Path], None], reason: str
) -> None:
    answers: list[bool] = []

    def agree(ok: bool) -> bool:
        answers.append(ok)
        return ok

    result = save(tmp_path, write, agree)
    assert reason in (result.error or "")
    assert answers == [True, False], "the other ranks wait for both answers"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing_call", [0, 1])
def test_nothing_is_published_if_another_rank_failed(tmp_path: Path, failing_call: int) -> None:
    calls: list[bool] = []

    def agree(ok: bool) -> bool:
        calls.append(ok)
        return ok and len(calls) - 1 != failing_call

    assert save(tmp_path, agree=agree).size_bytes is None
    assert calls == [True, True]
    assert list(tmp_path.iterdir()) == []


REGISTERS = """
import multiprocessing, sys
import ltui_rank

sys.stderr = sys.stdout

def train():
    print("resumed", ltui_rank.on_checkpoint(print, print), flush=True)

if __name__ == "__main__":
    if sys.argv[1] == "child":
        process = multiprocessing.get_context("spawn").Process(target=train)
        process.start()
        process.join()
    else:
        train()
"""


@pytest.mark.parametrize(
    ("process", "printed", "claims"),
    [
        ("child", "after init_process_group", False),  # its rank may be another's
        ("alone", "", True),
        ("unwritable", "no checkpoints and no telemetry", False),
    ],
)
def test_on_checkpoint_goes_on_where_ltui_cannot_be_used(
    tmp_path: Path, execute: Callable[..., str], process: str, printed: str, claims: bool
) -> None:
    run_dir = tmp_path / "run"
    if process == "unwritable":
        run_dir.write_text("no folder")
    settings = {"LTUI_RUN_DIR": str(run_dir), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    *complaints, last = execute(REGISTERS, process, **settings).splitlines()
    assert last == "resumed False"
    assert len(complaints) == bool(printed)
    assert printed in "".join(complaints)
    assert (run_dir / "queue").exists() == claims
    assert (run_dir / "queue" / "1" / "rank-00000.claim").exists() == claims
