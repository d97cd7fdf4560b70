"""What programs read: the envelope of ``--json``, its schema, the skill page, the public module."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui import api
from ltui.app.command_line.parser import all_commands
from ltui.app.commands.for_programs import commands_for_programs
from ltui.training.lifecycle.record_code import record_code
from ltui.training.problem import Problem, ProblemError
from tests.cli.conftest import Ltui
from tests.compare.stored_runs import config, losses, write_run
from tests.json_schema import mistakes
from tests.stored_runs import stored_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    printed = subprocess.run(
        [sys.executable, "-m", "ltui.app.cli", "schema"], capture_output=True, text=True, check=True
    ).stdout
    document: dict[str, Any] = json.loads(printed)
    return document


def test_the_schema_has_the_data_of_each_command_with_json(schema: dict[str, Any]) -> None:
    assert list(schema["data"]) == [command.name for command in commands_for_programs()]
    assert {"run", "show", "wait", "events", "data info"} <= schema["data"].keys()


def write_runs(home: Path) -> None:
    for number, rate in enumerate((0.1, 0.2, 0.1)):
        values = losses(50, lr=rate, seed=number)
        settings = config(lr=rate, seed=number)
        validation = {"val/loss": {step: values[step] for step in (10, 20, 49)}}
        run_id = f"calm-fox-000{number}"
        write_run(home, run_id, values, configuration=settings, metrics=validation)
    broken = {"train/loss": float("nan"), "acc": float("inf")}
    run_dir = stored_run(home, "dry-hare-0009", metrics=broken)
    record_code(run_dir, run_dir.read_spec(), 1)


@pytest.mark.parametrize(
    "line",
    [
        "runs",
        "runs --columns state,train/loss",
        "show dry-hare",
        "show calm-fox-0001",
        "show dry-hare --code",
        "diagnose dry-hare",
        "compare calm-fox*",
        "wait calm-fox-0001 dry-hare",
        "presets",
        "config",
        "doctor",
    ],
)
def test_an_answer_has_the_schema(
    command: Ltui, private_home: Path, schema: dict[str, Any], line: str
) -> None:
    write_runs(private_home)
    done = command(*line.split(), "--json")
    document = json.loads(done.stdout)
    assert mistakes(document, schema, schema) == []
    assert mistakes(document["data"], schema["data"][line.split()[0]], schema) == []
    assert (document["ok"], document["error"], document["truncated"]) == (True, None, False)


def test_the_answers_of_a_run_have_the_schema(ltui: Ltui, schema: dict[str, Any]) -> None:
    started = json.loads(ltui("exec", "--json", "--", "sleep", "60").stdout)
    assert started["next"] == [f"ltui wait {started['data']['id']}"]
    lines = (
        ("stop", "last", "--at", "+1h", "--json"),
        ("stop", "last", "--cancel", "--json"),
        ("stop", "last", "--json"),
    )
    answers = [("exec", started), *((line[0], json.loads(ltui(*line).stdout)) for line in lines)]
    for name, document in answers:
        assert mistakes(document, schema, schema) == []
        assert mistakes(document["data"], schema["data"][name], schema) == []
    assert answers[-1][1]["data"]["done"] is True
    assert answers[-1][1]["next"] == []  # There is no checkpoint to resume from.
    for printed in ltui("events", "last").stdout.splitlines():
        assert mistakes(json.loads(printed), schema["data"]["events"], schema) == []


def test_a_wrong_answer_is_noticed(schema: dict[str, Any]) -> None:
    form = schema["data"]["wait"]
    wrong = {"exit_code": "0", "waited_s": "soon", "runs": [{"id": None, "what": 1}]}
    found = mistakes(wrong, form, schema)
    assert len(found) >= 5, found


@pytest.mark.parametrize(
    ("line", "exit_code", "code", "words"),
    [
        ("show calm", 2, "no-such-run", "there is no such run"),
        ("show dry", 2, "several-runs", "several runs match"),
        ("stop dry-hare-0009", 2, "not-running", "it is not running"),
        ("resume dry-hare-0009", 2, "finished", "the run is finished"),
        ("wait dry-hare-0009 --until soon", 2, "bad-input", "invalid condition"),
        ("wait", 2, "bad-input", "required: RUN"),
        ("run no-such-preset", 2, "bad-input", "no-such-preset"),
        ("runs --filter ((", 2, "bad-input", "filter, column"),
        ("runs --wrong", 2, "bad-input", "--wrong"),
    ],
)
def test_an_error_is_an_answer(
    command: Ltui, private_home: Path, line: str, exit_code: int, code: str, words: str
) -> None:
    for run_id in ("dry-hare-0009", "dry-hare-0010"):
        stored_run(private_home, run_id)
    done = command(*line.split(), "--json")
    assert done.returncode == exit_code
    document = json.loads(done.stdout)
    assert (document["ok"], document["data"], document["error"]["code"]) == (False, None, code)
    assert words in document["error"]["message"]
    assert words in done.stderr
    assert command(*line.split()).stdout == ""


def test_an_unexpected_error_is_an_answer(
    command: Ltui, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr("ltui.app.commands.runs.list_all", fails)
    done = command("runs", "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (1, "internal")


def test_the_error_of_several_problems_has_each() -> None:
    error = ProblemError(Problem("a", "is wrong.", "Do x."), Problem("b", "is, too.", "Do x."))
    assert (error.code, str(error)) == ("bad-input", "a: is wrong. Do x.\nb: is, too. Do x.")


def test_the_page_lists_the_codes_and_the_functions() -> None:
    sources = [*(ROOT / "app").rglob("*.py"), *(ROOT / "training").rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in sources]
    in_code = {
        code
        for text in texts
        for code in re.findall(r'\b(?:code=|default_code = )"([a-z-]+)"', text)
    }
    table = PAGE.split("| code | meaning |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([a-z]+(?:-[a-z]+)*)`(?=[,| ])", table)) >= in_code
    assert {"bad-input", "no-such-run"} <= in_code
    functions = {name for name in api.__all__ if inspect.isfunction(getattr(api, name))}
    table = PAGE.split("| function | what it does")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)\(", table)) == functions


def test_the_module_is_light_and_prints_nothing() -> None:
    code = (
        "import sys; from ltui import api; assert api.runs() == ();"
        "print([m for m in ('torch', 'textual', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_values_of_the_module(private_home: Path) -> None:
    write_runs(private_home)
    assert [run.id for run in api.runs("calm", sort="id")] == [
        f"calm-fox-000{number}" for number in range(3)
    ]
    curves = api.metrics("calm-fox-0001", ["val/*"])
    assert curves["val/loss"].steps.tolist() == [10, 20, 49]
    assert api.metrics("calm-fox-0001", ["train/loss"], max_points=10)["train/loss"].count.max() > 1
    assert api.status("dry-hare").state.value == "finished"
    assert api.wait(["dry-hare"]).exit_code == 0
    assert len(api.compare(["calm-fox*"]).comparison.runs) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: api.start(api.LaunchOptions()),
        lambda: api.start(api.LaunchOptions(preset="quickstart", command=("true",))),
        lambda: api.start(api.LaunchOptions(command=("true",), overrides=("a=1",))),
        lambda: api.start(api.LaunchOptions(command="true")),  # type: ignore[arg-type]
        lambda: api.start(api.LaunchOptions(command=("true",), stop_signal="SIGNOTHING")),
        lambda: api.start(api.LaunchOptions(command=("true",), mirror="tensorbord")),
        lambda: api.start(api.LaunchOptions(command=("true",), restarts=-1)),
        lambda: api.start(api.LaunchOptions(command=("true",), on_stall=("explode", None))),
        lambda: api.resume(api.ResumeOptions(run="no-such-run")),
        lambda: api.compare(["a", "b"], axis="sideways"),
        lambda: api.metrics("no-such-run"),
        lambda: api.events("no-such-run"),
    ],
)
def test_wrong_arguments_start_nothing(private_home: Path, call: Any) -> None:
    with pytest.raises(ProblemError):
        call()
    assert not list((private_home / "runs").glob("*"))


@pytest.mark.parametrize(
    ("call", "arguments", "options"),
    [
        (api.wait, ([],), {}),
        (api.wait, ([5],), {}),
        (api.wait, ("dry-hare",), {"until": 5}),
        (api.wait, ("dry-hare",), {"until": []}),
        (api.wait, ("dry-hare",), {"for_at_most_s": "9m"}),
        (api.events, ("dry-hare",), {"since": "x"}),
        (api.runs, (5,), {}),
        (api.runs, (), {"sort": 5}),
        (api.status, (None,), {}),
        (api.metrics, ("dry-hare",), {"names": 5}),
        (api.metrics, ("dry-hare",), {"rank": "0"}),
        (api.compare, (5,), {}),
        (api.stop, ("dry-hare",), {"timeout_s": "soon"}),
        (api.stop_when, ("dry-hare",), {"at_step": "9"}),
        (api.hold_queued, ([],), {}),
        (api.move_queued, ("dry-hare", "1"), {}),
        (api.edit_queued, ("dry-hare",), {"slots": "2"}),
    ],
)
def test_arguments_of_the_wrong_type_are_problems_too(
    private_home: Path, call: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    stored_run(private_home, "dry-hare-0002")
    with pytest.raises(ProblemError, match=r"is not (a|in)|nothing is given|named by a text"):
        call(*arguments, **options)


def test_the_skill_page(command: Ltui, tmp_path: Path) -> None:
    page = command("skill").stdout
    assert page.startswith("---\nname: ltui\n")
    for one in commands_for_programs():
        assert f"- `ltui {one.name}" in page
        assert one.about in page
    assert "`ltui delete" not in page
    for place, folder in (
        ("claude", ".claude/skills"),
        ("agents", ".agents/skills"),
        ("mine", "mine"),
    ):
        path = tmp_path / folder / "ltui" / "SKILL.md"
        for words in ((), ()):  # The second time it is there already.
            assert command("skill", "--install", place, *words).returncode == 0
            assert path.read_text() == page
    path.write_text("my own")
    assert command("skill", "--install", "mine").returncode == 2
    assert path.read_text() == "my own"
    assert command("skill", "--install", "mine", "--force").returncode == 0
    (tmp_path / "file").write_text("")
    assert command("skill", "--install", "file").returncode == 2


def test_the_pages_name_every_command() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = [command.name for command in all_commands() if command.do != "-"]
    assert [name for name in names if not re.search(rf"\bltui {name}\b", text)] == []
