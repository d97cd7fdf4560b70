"""Mistakes in configurations and overrides: all at once, each with its place and what to do."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from msgspec.structs import replace

from ltui.app.cli import main
from ltui.training.config.device_selection import Machine
from ltui.training.config.ltui_section import Knob
from ltui.training.config.preset_discovery import preset_names
from ltui.training.config.presets import (
    Preset,
    apply_form,
    field_texts,
    load_preset,
    parse_field,
    parse_preset,
)
from ltui.training.config.run_spec import RunSpec, StallPolicy
from ltui.training.problem import Problem, ProblemError
from tests.presets.preset_spec import preset_spec

DEVICES = Knob(key="trainer.devices", label="devices", type="devices", default=1)
LAPTOP = Machine(gpus=0, cores=2)
TWO_GPUS = Machine(gpus=2, cores=8)
GOOD = """
trainer:
  max_epochs: 3
model:
  class_path: my_package.MyModel
  init_args:
    learning_rate: 1e-3
data:
  class_path: my_package.MyData
"""


def preset(text: str = GOOD) -> Preset:
    return parse_preset(dedent(text), name="my.yaml")


def spec(*overrides: str, text: str = GOOD, machine: Machine = LAPTOP) -> RunSpec:
    return preset_spec(preset(text), machine, overrides)


def problems(text: str = GOOD, *overrides: str, machine: Machine = LAPTOP) -> list[str]:
    try:
        spec(*overrides, text=text, machine=machine)
    except ProblemError as error:
        return [str(problem) for problem in error.problems]
    return []


def refused(text: str) -> list[str]:
    with pytest.raises(ProblemError) as caught:
        preset(text)
    return [str(p) for p in caught.value.problems]


def test_all_errors_are_reported_at_once_with_their_lines() -> None:
    text = """
    trainer:
      max_epoch: 3
      accumulate_grad_batches: 0
      precision: 17-mixed
      strategy: ddp_spawn
    modle: {}
    model:
      class_path: net.py
    data:
      clas_path: a.B
    """
    found = problems(text)
    assert len(found) == 7
    for line, path, words in (
        (3, "trainer.max_epoch", "Did you mean `trainer.max_epochs`?"),
        (4, "trainer.accumulate_grad_batches", "1 or more (got `0`)"),
        (5, "trainer.precision", "Did you mean `16-mixed`?"),
        (6, "trainer.strategy", "Use `ddp`."),
        (7, "modle", "Did you mean `model`?"),
        (9, "model.class_path", "`net.MyClass`"),
        (11, "data.clas_path", "Did you mean `data.class_path`?"),
    ):
        assert any(p.startswith(f"my.yaml:{line} {path}: ") and words in p for p in found), path


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.max_epoch=3", "Did you mean `trainer.max_epochs`?"),
        ("trainr.devices=2", "Did you mean `trainer.devices`?"),
        ("max_epochs=2", "Did you mean `trainer.max_epochs`?"),
        ("learning_rate=2", "Did you mean `model.init_args.learning_rate`?"),
        ("model.learning_rate=2", "Did you mean `model.init_args.learning_rate`?"),
        ("trainer.max_epochs=many", "must be a whole number, -1 or more (got `many`)"),
        ("trainer.max_epochs=1.5", "must be a whole number, -1 or more (got `1.5`)"),
        ("trainer.limit_val_batches=1.5", "a fraction from 0.0 to 1.0"),
        ("trainer.deterministic=perhaps", "true or false"),
        ("trainer.devices=soon", "must be auto, a number of devices, a list"),
        ("trainer.devices=0", "at least 1"),
        ("trainer.devices=[0,0]", "twice"),
        ("trainer.devices=64", "requested, but this machine has"),
        ("trainer.num_nodes=0", "must be a whole number, 1 or more"),
        ("trainer.max_epochs.x=2", "not a mapping"),
        ("model.class_path=MyModel", "a dotted path to a class"),
        ("trainer.max_epochs", "KEY=VALUE"),
        ("trainer..max_epochs=1", "KEY=VALUE"),
        ("model.init_args.x=[1", "invalid YAML"),
        ("model.init_args.x=\1", "invalid YAML"),
        ("model.init_args.x=${nowhere.y}", "cannot be resolved"),
    ],
)
def test_overrides_are_refused_where_they_were_made(override: str, words: str) -> None:
    found = problems(GOOD, override)
    assert len(found) == 1
    assert found[0].startswith("--set ")
    assert words in found[0]


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_epochs=null",
        "trainer.max_steps=-1",
        "trainer.limit_val_batches=0.5",
        "trainer.precision=bf16-mixed",
        "trainer.precision=32",
        "trainer.callbacks=[{class_path: EarlyStopping, init_args: {monitor: x}}]",
        "trainer.logger=false",
        "trainer.max_time=00:00:10:00",
        "seed_everything=true",
        "optimizer={class_path: Adam, init_args: {lr: 1e-4}}",
        "model.init_args.anything.at.all=1",
        "trainer.gradient_clip_val=0.5",
        "trainer.devices=-1",
    ],
)
def test_what_lightning_accepts_is_accepted(override: str) -> None:
    assert problems(GOOD, override) == []


@pytest.mark.parametrize(
    ("trainer", "machine", "nproc", "accelerator"),
    [
        ({}, LAPTOP, 1, "cpu"),
        ({"devices": 2}, LAPTOP, 2, "cpu"),
        ({"devices": "3"}, LAPTOP, 3, "cpu"),
        ({}, TWO_GPUS, 2, "gpu"),
        ({"devices": -1}, TWO_GPUS, 2, "gpu"),
        ({"devices": 1}, TWO_GPUS, 1, "gpu"),
        ({"devices": [1]}, TWO_GPUS, 1, "gpu"),
        ({"devices": "0,1"}, TWO_GPUS, 2, "gpu"),
        ({"accelerator": "cpu", "devices": 4}, TWO_GPUS, 4, "cpu"),
    ],
)
def test_devices_are_decided(
    trainer: dict[str, object], machine: Machine, nproc: int, accelerator: str
) -> None:
    built = spec(*(f"trainer.{k}={v}" for k, v in trainer.items()), machine=machine)
    assert built.nproc == nproc
    assert built.config is not None
    assert built.config["trainer"]["accelerator"] == accelerator


@pytest.mark.parametrize(
    ("overrides", "machine", "words"),
    [
        (["trainer.devices=4"], TWO_GPUS, "this machine has 2"),
        (["trainer.devices=[0,2]"], TWO_GPUS, "no GPU 2"),
        (["trainer.accelerator=gpu"], LAPTOP, "this machine has none"),
        (["trainer.devices=[0]"], LAPTOP, "this machine has none"),
        (["trainer.accelerator=cpu", "trainer.devices=9"], LAPTOP, "too many"),
    ],
)
def test_devices_that_do_not_exist(overrides: list[str], machine: Machine, words: str) -> None:
    (found,) = problems(GOOD, *overrides, machine=machine)
    assert words in found


def test_interpolations_are_replaced_and_numbers_read_as_lightning_does() -> None:
    built = spec("data.init_args={rate: '${model.init_args.learning_rate}', day: 2026-01-02}")
    assert built.config is not None
    assert built.config["data"]["init_args"] == {"rate": 0.001, "day": "2026-01-02"}


@pytest.mark.parametrize("called", [("mail", "me"), "https://alarm.example/hook", None])
def test_what_is_done_about_a_stall_survives_the_file(called: tuple[str, ...] | str | None) -> None:
    stall = StallPolicy(then="restart", restarts=2, on_verdict=called)
    built = replace(spec("trainer.devices=2"), stall=stall)
    written = yaml.safe_load(yaml.safe_dump(built.to_document()))
    assert RunSpec.from_document(written) == built


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "my.yaml:"),
        ("", "empty"),
        ("- 1", "not a mapping"),
        ("model: \0", r"contains '\x00', which is not allowed"),
        ("model: {}\nmodel: {}\n", "my.yaml:2 model: duplicate key"),
        ("model: &m\n  x: *m\n", "contains itself"),
        ("model: !!python/object:os.system {}\n", "invalid YAML"),
        ("model: {class_path: a.B}\nltui: {knob: []}", "Did you mean `knobs`?"),
        ("ltui: {knobs: [{label: x}]}", "the key `key` is missing"),
        ("ltui: {knobs: [{key: a.b, type: choice}]}", "needs a list of choices"),
        ("ltui: {knobs: [{key: a.b, type: integer}]}", "must be one of int"),
        ("ltui: {after_fit: [tests]}", "ltui.after_fit.0: must be one of validate, test"),
        ("ltui: {after_fit: validate}", "must be a list (got `validate`)"),
        ("ltui: {stall: {floor: 3}}", "Did you mean `floor_s`?"),
        ("ltui: {stall: {than: stop}}", "Did you mean `then`?"),
        ("ltui: {stall: {then: restrat}}", "one of nothing, stop, restart (got"),
        ("ltui: {stall: {then: restrat}}", "Did you mean `restart`?"),
        ("ltui: {stall: {then: null}}", "one of nothing, stop, restart"),
        ("ltui: {stall: {restarts: -1}}", "a whole number, 0 or more"),
        ("ltui: {stall: {restart: 2}}", "Did you mean `restarts`?"),
        ("ltui: {stall: {on_verdict: notify-send}}", "a command as a list of strings"),
        ("ltui: {stall: {on_verdict: 'http://'}}", "a webhook's URL"),
        ("ltui: {stall: {on_verdict: []}}", "the program, then its arguments"),
        ("ltui: {stall: {on_verdict: [say, 1]}}", "the program, then its arguments"),
        ("ltui: {stall: {on_verdict: 3}}", "must be text or a list"),
        ("ltui: {stall: {on_verdict_level: stuck}}", "one of dead, stalled, slow, warning"),
        ("ltui: {cpu_ranks: 0}", "1 or more"),
        ("ltui: {restarts: '0x10'}", "0 or more, without quotes (got `0x10`)."),
        ("ltui: {stall: {floor_s: '1_000'}}", "0 or more, without quotes (got `1_000`)."),
        pytest.param(
            f"ltui: {{stall: {{cap_s: 1{'0' * 400}}}}}", "a number, 0 or more", id="400 digits"
        ),
    ],
)
def test_files_that_are_refused(text: str, words: str) -> None:
    assert any(words in problem for problem in refused(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("[2]", [2]), ("2,", [2]), ("[0, 1]", [0, 1]), ("0,1", [0, 1]), ("-1", -1),
     ("auto", "auto"), ("free:2", "free:2")],
)  # fmt: skip
def test_a_number_of_devices_is_no_list(text: str, value: object) -> None:
    assert parse_field(DEVICES, text) == value


@pytest.mark.parametrize("text", ["x", "[x]", "[0", "[0, 0]", "0", "-2", "free:0"])
def test_a_text_that_is_no_devices(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|twice|expected"):
        parse_field(DEVICES, text)


ALIASES = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALIASES, "its anchors stand for more than"),
        ("a: " + "[" * 5000 + "]" * 5000, "levels deep"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(1000)), "levels deep"),
    ],
    ids=["aliases", "brackets", "indentation"],
)
def test_a_yaml_bomb_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str, words: str
) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    assert main([command, str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(str(file))
    assert words in line


def test_files_are_found_named_and_missed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    assert preset_names(tmp_path)[0] == "quickstart"
    assert "./mine.yaml" in preset_names(tmp_path)
    assert "./compose.yaml" not in preset_names(tmp_path)
    loaded = load_preset("./mine.yaml", tmp_path)
    assert preset_spec(loaded, LAPTOP).python_path == (str(tmp_path),)
    for name, words in (
        ("quikstart", "Did you mean `quickstart`?"),
        ("mine.yml", "no such file"),
        ("mine", "Did you mean `./mine.yaml`?"),
        (str(tmp_path), "a folder"),
    ):
        with pytest.raises(ProblemError, match=r".") as caught:
            load_preset(name, tmp_path)
        assert words in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match="UTF-8"):
        load_preset("x.yaml", tmp_path)


def test_settings_below_the_subcommand() -> None:
    text = "fit:\n  trainer: {max_epochs: many}\n  model: {class_path: a.B}\n"
    assert problems(text)[0].startswith("my.yaml:2 trainer.max_epochs: ")


def test_a_form_reports_errors_at_their_fields() -> None:
    quickstart = load_preset("quickstart")
    texts = field_texts(quickstart)
    assert apply_form(quickstart, texts, LAPTOP).overrides == ()
    changed = {
        "trainer.devices": "100",
        "trainer.max_epochs": "0",
        "data.init_args.batch_size": "",
        "data.init_args.loader": "magic",
        "model.init_args.learning_rate": "1e-3",
    }
    result = apply_form(quickstart, {**texts, **changed}, LAPTOP)
    assert {p.where for p in result.problems} == {
        "trainer.devices",
        "trainer.max_epochs",
        "data.init_args.batch_size",
        "data.init_args.loader",
    }
    assert result.document["model"]["init_args"]["learning_rate"] == 0.001
    assert "model.init_args.learning_rate=0.001" in result.overrides


def test_a_forms_overrides_give_its_document() -> None:
    quickstart = load_preset("quickstart")
    texts = {"trainer.devices": "2", "trainer.max_epochs": "5", "data.init_args.loader": "torch"}
    result = apply_form(quickstart, texts, LAPTOP)
    assert result.problems == ()
    built = preset_spec(quickstart, LAPTOP, result.overrides)
    assert built.config is not None
    assert built.config["data"] == result.document["data"]
    assert built.config["trainer"]["max_epochs"] == 5


def test_a_problem_is_one_line() -> None:
    problem = Problem(where="a\nb", what="unexpected key\r\n'x\u2028y'.", remedy="Remove it.")
    assert str(problem) == "a b: unexpected key 'x y'. Remove it."
