"""Looks around in the interpreter that would train: versions of packages, names in its classes.

Run as a file by that interpreter, which may hold neither ltui nor torch, so it imports only the
standard library and nothing that it asks about: sources are found and read, never executed. Reads
one JSON document from standard input, ``{"packages": [module], "class_paths": {place: path},
"folders": [path], "rooms": {module: folder}}``, and prints one.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def find_module(name: str, rooms: dict[str, str]) -> ModuleSpec | str:
    """The module's spec without importing its parents, or the beginning that does not exist."""
    path: list[str] | None = None
    found: ModuleSpec | None = None
    done: list[str] = []
    for part in name.split("."):
        done.append(part)
        dotted = ".".join(done)
        if dotted in rooms:
            path, found = [rooms[dotted]], None
            continue
        if dotted == "ltui" and rooms:
            continue
        found = _top_level(dotted) if len(done) == 1 else PathFinder.find_spec(dotted, path)
        if found is None:
            return dotted
        path = list(found.submodule_search_locations or ())
    return found if found is not None else name


def _top_level(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, None) if find else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def inspect_class(class_path: str, rooms: dict[str, str]) -> dict[str, Any]:
    """What is known of a class without importing it.

    ``missing`` (module, source or class), else ``lacks`` (modules that its file imports and that
    are not there) and ``parameters`` (of ``__init__``, where that can be told).
    """
    module, _, name = class_path.rpartition(".")
    spec = find_module(module, rooms)
    if isinstance(spec, str):
        return {"missing": "module", "name": spec}
    if not spec.origin or not spec.origin.endswith(".py"):
        return {}
    try:
        with open(spec.origin, "rb") as file:
            tree = ast.parse(file.read(), spec.origin)
    except (OSError, ValueError, SyntaxError) as error:
        return {"missing": "source", "name": f"{type(error).__name__}: {error}"}
    names, complete = top_level_names(tree.body)
    if name not in names and complete:
        return {"missing": "class", "name": name, "file": spec.origin, "known": sorted(names)}
    lacks = sorted(missing_imports(module, tree, rooms, set()))
    return {"parameters": parameters(tree, name), "lacks": lacks}


def missing_imports(
    module: str, tree: ast.Module, rooms: dict[str, str], seen: set[str]
) -> set[str]:
    """Top-level packages that a file imports without conditions and that are not there.

    Files of ``rooms`` that it imports are looked at as well; other packages answer for themselves.
    """
    missing: set[str] = set()
    for name in imported_modules(module, tree):
        if name in seen:
            continue
        seen.add(name)
        if any(name == room or name.startswith(room + ".") for room in rooms):
            spec = find_module(name, rooms)
            if not isinstance(spec, str) and (spec.origin or "").endswith(".py"):
                with open(str(spec.origin), "rb") as file:
                    missing |= missing_imports(name, ast.parse(file.read()), rooms, seen)
        elif isinstance(find_module(name.split(".")[0], {}), str):
            missing.add(name.split(".")[0])
    return missing


def imported_modules(module: str, tree: ast.Module) -> list[str]:
    """Modules named by the import statements that always run."""
    found: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            found += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            found.append(statement.module)
    return [name for name in found if name != module]


def top_level_names(body: list[ast.stmt]) -> tuple[set[str], bool]:
    """The names that a module binds or may bind, and whether there can be no others."""
    names: set[str] = set()
    for statement in body:
        names |= _bound_by(statement)
    return names, "*" not in names and "__getattr__" not in names and "globals" not in names


def _bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    for handler in getattr(statement, "handlers", []):
        inner += handler.body
    if inner:
        return {name for child in inner for name in _bound_by(child)} | _names_in(
            [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
        )
    # Names that are only read are counted as well: better one too many than a class denied.
    return _names_in([statement])


def _names_in(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def parameters(tree: ast.Module, name: str) -> dict[str, str] | None:
    """What the class's own ``__init__`` takes, each with its annotation as written.

    None where that can't be told from its text.
    """
    classes = [s for s in tree.body if isinstance(s, ast.ClassDef) and s.name == name]
    if not classes or classes[-1].decorator_list:
        return None
    inits = [s for s in classes[-1].body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
    if not inits or inits[-1].decorator_list or inits[-1].args.kwarg or inits[-1].args.vararg:
        return None
    arguments = inits[-1].args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
    return {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in named}


def versions(packages: list[str]) -> dict[str, str | None]:
    """Module name to version: ``?`` where its distribution has none, None where it is missing."""
    found: dict[str, str | None] = {}
    for module in packages:
        if isinstance(find_module(module, {}), str):
            found[module] = None
            continue
        try:
            found[module] = metadata.version(_DISTRIBUTIONS.get(module, module))
        except metadata.PackageNotFoundError:
            found[module] = "?"
    return found


_DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
}


def main() -> None:
    asked = json.load(sys.stdin)
    # What ranks find first: the folders that the run adds, not this file's own.
    sys.path[0:1] = asked.get("folders", [])
    rooms = asked.get("rooms", {})
    answer = {
        "python": ".".join(str(n) for n in sys.version_info[:3]),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "cpus": len(os.sched_getaffinity(0)),
        "packages": versions(asked.get("packages", [])),
        "classes": {
            place: inspect_class(path, rooms)
            for place, path in asked.get("class_paths", {}).items()
        },
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
