"""The README and ``docs/`` name commands, presets, keys, settings and files that exist."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ltui.app.commands.parser import build_parser
from ltui.app.panels.runs_table import RunsTable
from ltui.app.screens.home import HomeScreen
from ltui.app.screens.run import RunScreen
from ltui.app.textual_app import LtuiApp
from ltui.training.config.preflight import apply_overrides
from ltui.training.config.preset_discovery import shipped_names
from ltui.training.config.presets import load_preset
from ltui.widgets.charts.chart import Chart
from ltui.widgets.log_view import LogView

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = (README, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md")))
MOST_LINES = {"README.md": 130, "docs/architecture.md": 250}
CODE_PATH = re.compile(r"`((?:app|training|widgets|presets|tests|docs|\.ci)/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
TWO_COMMANDS = re.compile(r" {2,}(?=ltui )")
"""At least two spaces separate several commands on one line."""
KEY_NAMES = {
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "slash": "/",
    "asterisk": "*",
    "escape": "esc",
    "delete": "del",
}
EVERYWHERE = {"tab", "ctrl+p", "shift", "arrows"}
"""Keys of Textual on every screen, and words for several keys."""


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language (perhaps empty) and the text of every fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)


def commands_in(text: str) -> list[str]:
    """Return every ``ltui ...`` command of the fenced blocks without a language."""
    commands = []
    for language, block in code_blocks(text):
        lines = [] if language else block.splitlines()
        for line in itertools.chain.from_iterable(TWO_COMMANDS.split(line) for line in lines):
            match = re.match(r"(?:[A-Z_]+=\S+ )*(?:srun (?:--\S+ )*)?(ltui( .*)?)$", line.strip())
            if match:
                commands.append(match[1])
    return commands


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def parse(command: str) -> tuple[bool, str]:
    """Return whether the real parser accepts the command, and its message if it does not."""
    output, words = io.StringIO(), words_of(command)
    if words[:1] == ["submit"] and "--" in words:
        # The command line removes the command before it parses the options.
        words = words[: words.index("--")]
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            build_parser().parse_args(words)
    except SystemExit as stop:
        return stop.code in (0, None), output.getvalue()
    return True, ""


def all_commands() -> list[tuple[str, str]]:
    return [
        (page_id(page), command)
        for page in PAGES
        for command in commands_in(page.read_text(encoding="utf-8"))
    ]


def inline_commands(text: str) -> list[list[str]]:
    """Split every command in code quotes into words: ``ltui run``, ``ltui stop --at +2h``."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [code.split()[1:] for code in re.findall(r"`(ltui [^`\n]+)`", prose)]


def unknown_word(words: list[str]) -> str | None:
    """Return the first command or option of an inline command that the parser does not know."""
    parser: Any = build_parser()
    for word in words:
        group = parser._subparsers
        commands = group._group_actions[0].choices if group is not None else {}
        option = word.partition("=")[0]
        if option == "--" or word in commands:
            parser = commands.get(word, parser)
            if option == "--":
                return None
        elif (commands and option[:1] != "-") or (
            option[:1] == "-" and option not in parser._option_string_actions
        ):
            return word
    return None


def anchors(page: Path) -> set[str]:
    """Return the link targets of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def bound_keys(*kinds: type) -> set[str]:
    """Return every key that the classes bind, as it is printed on a keyboard."""
    keys = set()
    for kind in kinds:
        for binding in getattr(kind, "BINDINGS", ()):
            text = binding[0] if isinstance(binding, tuple) else binding.key
            keys |= {KEY_NAMES.get(key.strip(), key.strip()) for key in text.split(",")}
    return keys


def keys_in_table(text: str, heading: str) -> set[str]:
    """Return the keys in the first column of the first table below ``heading``."""
    below = text.split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", below, re.M)
    assert table is not None
    keys: set[str] = set()
    for row in table[0].splitlines()[2:]:
        for first, last in re.findall(r"`([^`]+)`(?:-`([^`]+)`)?", row.split("|")[1]):
            if last:
                keys |= {str(number) for number in range(int(first), int(last) + 1)}
            else:
                keys.add(first)
    return keys


@pytest.mark.parametrize(("page", "command"), all_commands())
def test_every_command_is_accepted_by_the_parser(page: str, command: str) -> None:
    accepted, message = parse(command)
    assert accepted, message


def test_there_are_commands_and_a_wrong_one_is_noticed() -> None:
    assert len(commands_in(README.read_text(encoding="utf-8"))) >= 10
    assert not parse("ltui stopp last")[0]
    assert not parse("ltui run quickstart --epochs 3")[0]
    block = "```\nltui runs     ltui show last    # words\nA=1 srun --n=2 ltui attach\n```\n"
    assert [words_of(c) for c in commands_in(block)] == [["runs"], ["show", "last"], ["attach"]]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_inline_commands_exist(page: Path) -> None:
    for words in inline_commands(page.read_text(encoding="utf-8")):
        if words[0].isalpha() or words[0].startswith("-"):
            assert unknown_word(words) is None, words


def test_a_wrong_inline_command_is_noticed() -> None:
    assert unknown_word(["stopp", "last"]) == "stopp"
    assert unknown_word(["data", "biuld"]) == "biuld"
    assert unknown_word(["run", "quickstart", "--restart", "3"]) == "--restart"
    assert unknown_word(["exec", "--", "torchrun", "--nproc-per-node", "2"]) is None
    assert inline_commands("`ltui stop --kill` and\n```\nltui runs\n```\n") == [["stop", "--kill"]]


def test_commands_name_presets_and_settings_that_exist() -> None:
    checked = 0
    for page, command in all_commands():
        words = words_of(command)
        options = build_parser().parse_args(words) if words[:1] == ["run"] else None
        if options is None or options.preset.endswith(".yaml"):
            continue
        assert options.preset in shipped_names(), (page, command)
        apply_overrides(load_preset(options.preset).document, options.overrides)
        checked += 1
    assert checked >= 5


def test_the_table_of_presets_is_complete() -> None:
    text = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.M)) == set(shipped_names())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_of_the_code_exist(page: Path) -> None:
    for path in CODE_PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


def test_links_paths_and_yaml_are_found_in_the_pages() -> None:
    """The tests of each page pass where they find nothing; some page has something of each."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len(LINK.findall(text)) >= 10
    assert len(CODE_PATH.findall(text)) >= 10
    assert len(inline_commands(text)) >= 10
    assert [block for language, block in code_blocks(text) if language == "yaml"]


def test_pages_that_the_code_names_exist() -> None:
    named = set()
    for path in itertools.chain.from_iterable(
        (ROOT / folder).rglob("*.py") for folder in ("app", "training", "widgets")
    ):
        named |= set(re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text(encoding="utf-8")))
    assert named
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_the_script_that_takes_the_pictures_imports_names_that_exist() -> None:
    tree = ast.parse((ROOT / ".ci" / "screens").read_text(encoding="utf-8"))
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ltui.")
    ]
    assert imports
    for node in imports:
        module = importlib.import_module(str(node.module))
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def parameters_in_code() -> dict[str, set[str]]:
    """Return the parameters (or fields) of each function and class of the data package."""
    parameters: dict[str, set[str]] = {}
    for path in (ROOT / "training" / "data").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.FunctionDef):
                functions = [node]
            elif isinstance(node, ast.ClassDef):
                names = {f.target.id for f in fields_of(node) if isinstance(f.target, ast.Name)}
                functions = [f for f in node.body if isinstance(f, ast.FunctionDef)]
                functions = [f for f in functions if f.name == "__init__"]
            else:
                continue
            for function in functions:
                arguments = function.args
                names |= {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
            parameters[node.name] = names
    return parameters


def fields_of(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [part for part in node.body if isinstance(part, ast.AnnAssign)]


def test_python_examples_call_what_exists() -> None:
    parameters = parameters_in_code()
    checked = 0
    for page in PAGES:
        for language, block in code_blocks(page.read_text(encoding="utf-8")):
            if language != "python":
                continue
            for call in (n for n in ast.walk(ast.parse(block)) if isinstance(n, ast.Call)):
                if not isinstance(call.func, ast.Name) or call.func.id in dir(builtins):
                    continue
                assert call.func.id in parameters, (page_id(page), call.func.id)
                keywords = {str(k.arg) for k in call.keywords}
                assert keywords <= parameters[call.func.id], (call.func.id, keywords)
                checked += 1
    assert checked >= 5


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_yaml_examples_are_valid(page: Path) -> None:
    for language, block in code_blocks(page.read_text(encoding="utf-8")):
        if language == "yaml":
            assert isinstance(yaml.safe_load(block), dict)


def test_every_page_of_the_docs_is_linked_from_the_readme() -> None:
    links = set(LINK.findall(README.read_text(encoding="utf-8")))
    assert {page_id(page) for page in PAGES} - {"README.md"} <= links


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    checked = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = "\n".join(block for _, block in code_blocks(text))
        named = re.findall(r"`make ([a-z]+)", text) + re.findall(r"^make ([a-z]+)", blocks, re.M)
        assert set(named) <= targets, page_id(page)
        checked += len(named)
    assert checked >= 5


def test_the_readme_names_its_two_commands_and_that_no_gpu_was_used() -> None:
    start = README.read_text(encoding="utf-8").split("## Start")[1].split("\n## ")[0]
    commands = [
        line.split("#")[0].strip() for _, block in code_blocks(start) for line in block.splitlines()
    ]
    assert {"make run", "make test"} <= set(commands)
    assert "not been used on\na real GPU" in start
    assert "Nothing was run on a real GPU" in (ROOT / "docs/limits.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", MOST_LINES)
def test_a_page_keeps_its_length(path: str) -> None:
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[path]


def test_the_keys_of_the_readme_exist() -> None:
    named = keys_in_table(README.read_text(encoding="utf-8"), "## Keys")
    assert {"s", "1", "6", "?"} <= named
    existing = bound_keys(RunScreen, LogView, Chart, LtuiApp) | EVERYWHERE
    assert named <= existing


def test_the_keys_of_the_dashboard_page_exist() -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    run = keys_in_table(text, "## A run")
    assert run <= bound_keys(RunScreen, LogView, Chart, LtuiApp) | EVERYWHERE
    home = keys_in_table(text, "## Home screen")
    assert home <= bound_keys(HomeScreen, RunsTable, LtuiApp)
