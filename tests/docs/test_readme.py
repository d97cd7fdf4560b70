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

from ltui.app.command_line.parser import build_parser
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
PARSER = build_parser()
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}
"""The text of each page, by its path."""
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
    "comma": ",",
    "full_stop": ".",
    "slash": "/",
    "asterisk": "*",
    "escape": "esc",
    "delete": "del",
}
EVERYWHERE = {"tab", "ctrl+p", "shift", "arrows"}
"""Keys of Textual on every screen, and words for several keys."""


def code_blocks(text: str, wanted: str | None = None) -> Iterator[str]:
    """Yield the text of every fenced block, or of those in a language (which may be empty)."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if wanted in (None, language):
            yield block


def commands_in(text: str) -> Iterator[str]:
    """Yield every ``ltui ...`` command of the fenced blocks without a language."""
    lines = [line for block in code_blocks(text, "") for line in block.splitlines()]
    for line in itertools.chain.from_iterable(map(TWO_COMMANDS.split, lines)):
        match = re.match(r"(?:[A-Z_]+=\S+ )*(?:srun (?:--\S+ )*)?(ltui( .*)?)$", line.strip())
        if match:
            yield match[1]


def words_of(command: str) -> list[str]:
    words = shlex.split(command, comments=True)[1:]
    if words[:1] in (["submit"], ["sweep"]) and "--" in words:
        # The command line removes the command before it parses the options.
        words = words[: words.index("--")]
    return words


COMMANDS = [(page, command) for page, text in PAGES.items() for command in commands_in(text)]


def inline_commands(text: str) -> list[list[str]]:
    """Split every command in code quotes into words: ``ltui run``, ``ltui stop --at +2h``."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [code.split()[1:] for code in re.findall(r"`(ltui [^`\n]+)`", prose)]


def unknown_word(words: list[str]) -> str | None:
    """Return the first command or option of an inline command that the parser does not know."""
    parser: Any = PARSER
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


def anchors(text: str) -> set[str]:
    """Return the link targets of a page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", h.lower()) for h in re.findall(r"^#+ (.*)$", text, re.M))
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


def test_every_command_is_accepted_by_the_parser() -> None:
    assert len(COMMANDS) >= 10
    for page, command in COMMANDS:
        output, code = io.StringIO(), None
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            try:
                PARSER.parse_args(words_of(command))
            except SystemExit as stop:
                code = stop.code
        assert code in (0, None), (page, command, output.getvalue())


def test_inline_commands_exist() -> None:
    found = [(page, words) for page, text in PAGES.items() for words in inline_commands(text)]
    assert len(found) >= 10
    for page, words in found:
        if words[0].isalpha() or words[0].startswith("-"):
            assert unknown_word(words) is None, (page, words)


def test_commands_name_presets_and_settings_that_exist() -> None:
    checked = 0
    for page, command in COMMANDS:
        words = words_of(command)
        options = PARSER.parse_args(words) if words[:1] == ["run"] else None
        if options is None or options.preset.endswith(".yaml"):
            continue
        assert options.preset in shipped_names(), (page, command)
        apply_overrides(load_preset(options.preset).document, options.overrides)
        checked += 1
    assert checked >= 5


def test_the_table_of_presets_is_complete() -> None:
    text = PAGES["docs/presets.md"]
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.M)) == set(shipped_names())


def test_links_lead_somewhere() -> None:
    links = [(page, link) for page, text in PAGES.items() for link in LINK.findall(text)]
    assert len(links) >= 10
    for page, link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not re.match(r"[a-z]+:", link):
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), (page, link)


def test_paths_of_the_code_and_pages_that_the_code_names_exist() -> None:
    in_pages = [path for text in PAGES.values() for path in CODE_PATH.findall(text)]
    sources = (
        path for room in ("app", "training", "widgets") for path in ROOT.glob(f"{room}/**/*.py")
    )
    in_code = [
        page
        for path in sources
        for page in re.findall(r"\bdocs/[\w-]+\.md\b", path.read_text(encoding="utf-8"))
    ]
    assert len(in_pages) >= 10
    assert in_code
    assert [path for path in (*in_pages, *in_code) if not (ROOT / path).exists()] == []


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
    trees = [ast.parse(b) for text in PAGES.values() for b in code_blocks(text, "python")]
    calls = [
        node
        for node in itertools.chain.from_iterable(map(ast.walk, trees))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id not in dir(builtins)
    ]
    assert len(calls) >= 5
    for call in calls:
        name, keywords = call.func.id, {str(k.arg) for k in call.keywords}  # type: ignore[attr-defined]
        assert keywords <= parameters[name], (name, keywords)


def test_yaml_examples_are_valid() -> None:
    examples = [(p, block) for p, text in PAGES.items() for block in code_blocks(text, "yaml")]
    assert examples
    for page, block in examples:
        assert isinstance(yaml.safe_load(block), dict), (page, block)


def test_every_page_of_the_docs_is_linked_from_the_readme() -> None:
    assert PAGES.keys() - {"README.md"} <= set(LINK.findall(README))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(PAGES.values())
    named = re.findall(r"`make ([a-z]+)", text)
    named += re.findall(r"^make ([a-z]+)", "\n".join(code_blocks(text)), re.M)
    assert len(named) >= 5
    assert set(named) <= set(re.findall(r"^([a-z]+):", makefile, re.M))


def test_the_readme_names_its_two_commands_and_that_no_gpu_was_used() -> None:
    start = README.split("## Start")[1].split("\n## ")[0]
    lines = [line for block in code_blocks(start) for line in block.splitlines()]
    assert {"make run", "make test"} <= {line.split("#")[0].strip() for line in lines}
    assert "not been used on\na real GPU" in start
    assert "Nothing was run on a real GPU" in PAGES["docs/limits.md"]


@pytest.mark.parametrize("path", MOST_LINES)
def test_a_page_keeps_its_length(path: str) -> None:
    assert len(PAGES[path].splitlines()) <= MOST_LINES[path]


def test_the_keys_of_the_readme_and_the_dashboard_page_exist() -> None:
    named = keys_in_table(README, "## Keys")
    assert {"s", "1", "6", "?"} <= named
    page = PAGES["docs/dashboard.md"]
    existing = bound_keys(RunScreen, LogView, Chart, LtuiApp) | EVERYWHERE
    assert named | keys_in_table(page, "## A run") <= existing
    home = keys_in_table(page, "## Home screen")
    assert home <= bound_keys(HomeScreen, RunsTable, LtuiApp)
