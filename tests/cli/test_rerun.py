"""``ltui rerun``: what is compared, what is named before it starts, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ltui.app.actions.rerun_code import find_effects, reached_files, sources
from ltui.app.actions.rerun_results import compare_losses, first_nans
from ltui.app.actions.rerun_steps import RerunResult, RerunStart
from ltui.app.commands.rerun import result_lines
from ltui.training.config.run_spec import RunSpec
from ltui.training.store.run_directory import RunDir
from tests.cli.conftest import Ltui
from tests.compare.stored_runs import losses, write_run
from tests.stored_runs import stored_run

NAN = math.nan
BEFORE: Any = {("loss", 0): {4: (0.5,), 5: (0.25, 0.75), 6: (NAN,)}, ("step/loss", 1): {5: (NAN,)}}


@pytest.mark.parametrize(
    ("again", "steps", "first"),
    [
        (BEFORE, 3, None),
        ({("loss", 0): {5: (0.25, 0.75)}}, 1, None),
        ({("loss", 0): {4: (-0.0,), 5: (0.25, 0.75 + 2**-53)}}, 2, (4, 0, 0.5, -0.0)),
        ({("loss", 0): {5: (0.25, 0.75 + 2**-53)}}, 1, (5, 0, 0.75, 0.75 + 2**-53)),
        ({("loss", 0): {5: (0.25,)}}, 1, (5, 0, 0.75, None)),
        ({("loss", 0): {6: (1.0,)}, ("step/loss", 1): {5: (1.0,)}}, 2, (5, 1, NAN, 1.0)),
        ({("other", 0): {5: (1.0,)}}, 0, None),
    ],
)
def test_the_first_loss_that_differs_in_a_bit_is_found(
    again: Any, steps: int, first: tuple[Any, ...] | None
) -> None:
    comparison = compare_losses(BEFORE, again)
    assert (comparison.steps, comparison.missing_steps) == (steps, 3 - steps)
    assert comparison.is_whole == (steps == 3)
    found = comparison.first
    values = None if found is None else (found.step, found.rank, found.before, found.again)
    assert repr(values) == repr(first)


def test_the_rank_in_which_a_nan_began_comes_first() -> None:
    def nan(step: int, where: str, **more: Any) -> dict[str, Any]:
        return {"at_step": step, "where": where, "tensor": "output 0", **more}

    head = {"module": "head", "module_class": "Linear", "count": 2, "of": 8}
    found = first_nans(
        [
            (0, nan(7, "after the step")),
            (1, nan(7, "backward")),
            (3, nan(7, "forward", infinite_before="input 0 of head", **head)),
            (2, nan(8, "before the step")),
        ]
    )
    assert [each.rank for each in found] == [3, 1, 0, 2]
    assert found[0].text() == (
        "Step 7, rank 3, in the forward pass: output 0 of head (Linear) is NaN (2 of 8 elements). "
        "The first infinite value was in input 0 of head."
    )


def test_lines_that_write_are_found_in_what_the_script_imports(tmp_path: Path) -> None:
    files = {
        "train.py": "import lib.data\nfrom models import net\nopen('a')\nopen(p, 'w')\n",
        "lib/__init__.py": "shutil.rmtree(x)\n",
        "lib/data.py": "from . import more\n# open(p, 'w')\nPath(p).open(mode='ab')\n",
        "lib/more.py": "import train\nrequests.post(url)\n",
        "models.py": "frame.to_csv(p)\nx.copy()\nmodel.save_pretrained(p)\n@hydra.main()\n",
        "other.py": "open(p, 'w')\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    reached = reached_files([tmp_path / "train.py", tmp_path / "missing.py"], [tmp_path])
    words = "python", "x" * 5000, "", "-m", "train"
    spec = RunSpec(id="a", name="a", created_at=0, cwd=str(tmp_path), python="p", command=words)
    assert sources(RunDir(tmp_path), spec, None) == reached
    assert sorted(line.rpartition(": ")[0] for line in find_effects(reached)) == [
        "__init__.py:1",
        "data.py:3",
        "models.py:1",
        "models.py:3",
        "models.py:4",
        "more.py:2",
        "train.py:4",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--from 2", "--to"),
        ("--from 0 --to 2", "--from"),
        ("--from 5 --to 4", "and the last one not before it"),
        ("--from 40 --to 60", "the run has made steps 1 to 50"),
        ("--from 52 --to 60 --with nan", "the run has made steps 1 to 50"),
        ("--from 1 --to 20000 --with nan", "at most 10,000 steps"),
        ("--from 1 --to 49 --with profil", "profile"),
        ("--from 1 --to 60 --with memory", "at most 50 steps"),
        ("--from 2 --to 3 --with pdb --json", "it needs the terminal"),
        ("--from 2 --to 3 --rank one", "not a whole number"),
        ("--from 2 --to 3", "there is no such command"),
    ],
)
def test_wrong_input_is_refused_and_starts_nothing(
    command: Ltui, private_home: Path, words: str, said: str
) -> None:
    write_run(private_home, "calm-fox-0001", losses(50), command=("/no/such/program",))
    done = command("rerun", "calm-fox", *words.split())
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not (private_home / "reruns").exists()


def test_a_run_without_values_has_nothing_to_compare(command: Ltui, private_home: Path) -> None:
    write_run(private_home, "calm-fox-0001", [NAN] * 9, command=("/no/such/program",))
    done = command("rerun", "calm-fox", "--from", "2", "--to", "3")
    assert (done.returncode, "no values of these steps" in done.stderr) == (2, True)
    stored_run(private_home, "dry-hare-0002")
    done = command("rerun", "dry-hare", "--from", "1", "--to", "3")
    assert (done.returncode, "it has made no step" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("nan_loss", "is_equal", "words"),
    [
        ((None, None), True, ["No NaN in steps 2 to 4."]),
        ((5, None), True, ["No NaN in steps 2 to 4."]),
        ((3, None), True, ["No NaN in steps 2 to 4.", "The run had one at step 3: its code"]),
        ((3, 3), False, ["The loss is NaN or infinite since step 3, but no module had a NaN."]),
    ],
)
def test_a_search_without_a_nan_is_compared_with_the_losses(
    nan_loss: Any, is_equal: bool, words: list[str]
) -> None:
    start = RerunStart(
        run="r",
        instrument="nan",
        attempt=1,
        first_step=2,
        last_step=4,
        started_after=0,
        code="",
        not_silenced=(),
    )
    result = RerunResult(
        start=start, shadow="s", home="h", is_complete=True, detail="", nan_loss=nan_loss
    )
    assert result.is_equal == is_equal
    lines = list(result_lines(result))
    assert all(line.startswith(word) for line, word in zip(lines, words, strict=True))
