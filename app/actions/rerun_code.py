"""The code with which steps are executed again, and what it writes or sends by itself.

ltui silences loggers and checkpoints (``training/rank/silenced_writes.py``). What else leaves the
process is found by the names of the functions, so this is a hint and no proof.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.record_code import code_folder, code_now
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.code_record import read_diff, read_record
from ltui.training.store.frozen_code import (
    FrozenCode,
    changed_files,
    copied_path,
    frozen_command,
    listed,
    read_frozen,
)
from ltui.training.store.run_directory import RunDir

SILENCED = (
    "TensorBoard",
    "Weights & Biases",
    "Lightning's loggers and checkpoint callbacks",
    "checkpoints of Hugging Face's Trainer",
    "torch.save",
)
"""What writes nothing in a run that executes steps again."""
Sources = Mapping[Path, Sequence[str]]
"""Python files of the program, and the lines of each."""
MOST_FILES = 500
"""Number of files that are read."""
MOST_BYTES = 1 << 20
"""Bytes of a file that is read."""
_IMPORT = re.compile(r"\s*(?:from|import)\s+(\.*)([\w.]*)(?:\s+import\s+\(?(.*))?")
"""An import: its dots, its module, and the names that follow."""
_EFFECT = re.compile(
    r"""\bopen\([^)]*,\s*(?:mode\s*=\s*)?["'][rbt]*[wax+]
    | \.open\(\s*(?:mode\s*=\s*)?["'][rbt]*[wax+] | \.write_(?:text|bytes)\(
    | \b(?:np|numpy)\.save[z_a-z]*\( | \.to_(?:csv|parquet|json|pickle|hdf)\(
    | \bsave_(?:file|pretrained)\( | \bsave(?:fig|_image)\( | @hydra\.main\b
    | \b(?:json|pickle|yaml|joblib)\.dump\(
    | \b(?:dcp|checkpoint)\.(?:async_)?save\( | \bos\.(?:remove|unlink|rename|replace|rmdir)\(
    | \.unlink\( | \bshutil\.(?:rmtree|move|copy\w*)\( | \bsqlite3\.connect\(
    | \bsubprocess\.\w+\( | \bos\.system\( | \burlopen\( | \bboto3\b
    | \b(?:requests|httpx|session)\.(?:post|put|patch|delete)\( | \bpush_to_hub\(
    | \bupload_\w+\( | \bset_tracking_uri\( | \bimport\s+(?:comet_ml|aim|clearml)\b""",
    re.VERBOSE,
)
"""A part of a line that writes a file, sends something or starts a program."""


def frozen_code(run_dir: RunDir, spec: RunSpec, attempt: int) -> FrozenCode | None:
    """Return the copy with which an attempt has trained; None if its code was not frozen."""
    if not spec.freeze:
        return None
    copies = (read_frozen(run_dir, number) for number in range(min(attempt, spec.code_copy), 0, -1))
    return next((copy for copy in copies if copy is not None), None)


def code_text(run_dir: RunDir, spec: RunSpec, attempt: int, frozen: FrozenCode | None) -> str:
    """Return a sentence that says which code is used, and how it differs from that of then."""
    if frozen is not None:
        changed = changed_files(run_dir, frozen)
        since = f" (since then changed: {listed(changed, len(changed))})" if changed else ""
        return f"It uses the frozen code of attempt {frozen.number}{since}."
    then = read_record(run_dir, attempt)
    now, diff = code_now(spec, attempt)
    if then is None or then.commit is None or now.commit is None:
        why = (None if then is None else then.note) or now.note or "it was not recorded"
        return f"The code of attempt {attempt} is not known ({why}): it uses that of now."
    parts = []
    if then.commit != now.commit:
        parts.append(f"commit {then.commit[:10]} then, {now.commit[:10]} now")
    if not (then.diff_complete and now.diff_complete):
        parts.append("uncommitted changes are too long to compare")
    elif read_diff(run_dir, attempt).encode() != diff:
        names = sorted({*then.changed_files, *now.changed_files})
        parts.append(f"other uncommitted changes in {listed(names, len(names))}")
    differs = f"differs: {'; '.join(parts)}"
    equals = "is equal, as far as git tracks it"
    copy = f"There is no frozen copy of the code of attempt {attempt}."
    return f"{copy} That of now, which it uses, {differs if parts else equals}."


def with_copy(run_dir: RunDir, spec: RunSpec, frozen: FrozenCode | None) -> RunSpec:
    """Return ``spec`` with the files of the copy, since the originals may be gone."""
    if frozen is None or spec.command is None:
        return spec
    return spec.with_changes(command=frozen_command(run_dir, frozen, spec.command, spec.cwd))


def sources(run_dir: RunDir, spec: RunSpec, frozen: FrozenCode | None) -> Sources:
    """Return the lines of the program: of its scripts, and of what they import."""
    here = Path(spec.cwd)
    folders = [code_folder(spec), here, here / "src", *map(Path, spec.python_path)]
    if frozen is not None:
        folders = [Path(copied_path(run_dir, frozen, str(folder))) for folder in folders]
    words = with_copy(run_dir, spec, frozen).command or ()
    scripts = [here / word for word in words if word.endswith(".py")]
    for word in words:  # perhaps the name of a module
        place = Path(*word.split("."))
        scripts += [f / p for f in folders for p in (f"{place}.py", place / "__main__.py")]
    scripts = [script for script in scripts if os.path.isfile(script)]  # a word may be any text
    if not scripts and (spec.command is not None or spec.python_path):
        scripts = sorted(folders[0].glob("*.py"))
    return reached_files(scripts, folders)


def reached_files(scripts: Sequence[Path], folders: Sequence[Path]) -> Sources:
    """Return the lines of scripts and of what they import, directly or not, from ``folders``."""
    waiting, reached = list(scripts), dict[Path, list[str]]()
    while waiting and len(reached) < MOST_FILES:
        path = waiting.pop(0)
        if path in reached:
            continue
        try:
            reached[path] = read_regular(path, MOST_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        for line in reached[path]:
            if (found := _IMPORT.match(line)) is None:
                continue
            beside, module, names = found.groups()
            for folder in (path.parents[max(0, len(beside) - 1)],) if beside else folders:
                place = folder.joinpath(*module.split("."))
                parts = [place / name for name in re.findall(r"\w+", names or "")]
                for each in (place, *place.parents, *parts):
                    if folder in each.parents:
                        files = each.with_name(f"{each.name}.py"), each / "__init__.py"
                        waiting += [file for file in files if file.is_file()]
    return reached


def find_effects(program: Sources) -> Iterator[str]:
    """Yield ``train.py:41: open(path, "a")`` for each line that may write or send something."""
    for path, lines in program.items():
        for place, line in enumerate(lines, start=1):
            if _EFFECT.search(line.partition("#")[0]):
                yield f"{path.name}:{place}: {line.strip()}"
