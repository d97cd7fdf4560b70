"""Inspect the training interpreter: versions of packages, names and arguments of classes.

The training interpreter runs this file as a program. It may have neither ltui nor torch, so this
file imports only the standard library and none of the inspected modules: their sources are found
and parsed, never executed.

The program reads one JSON document from standard input and prints one. The input is ``{"packages":
[module], "distributions": {module: distribution}, "class_paths": {place: path}, "folders": [path],
"provided": {module: folder}}``. ``provided`` gives the folders of packages that ltui itself
provides to ranks.
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


def find_module(name: str, provided: dict[str, str]) -> ModuleSpec | str:
    """Return the module's spec without importing its parents, or the first part of its name that
    does not exist."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts: list[str] = []
    for part in name.split("."):
        parts.append(part)
        dotted = ".".join(parts)
        if dotted in provided:
            path, spec = [provided[dotted]], None
            continue
        if dotted == "ltui" and provided:
            continue
        spec = _find_top_level(dotted) if len(parts) == 1 else PathFinder.find_spec(dotted, path)
        if spec is None:
            return dotted
        path = list(spec.submodule_search_locations or ())
    return spec if spec is not None else name


def _find_top_level(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, None) if find else None
        if spec is not None:
            return spec  # type: ignore[no-any-return]
    return None


def inspect_class(class_path: str, provided: dict[str, str]) -> dict[str, Any]:
    """Return what the source says about a class, without importing it.

    The result has ``missing`` (module, source or class) if the class cannot be imported. Otherwise
    it has ``lacks``, the missing modules that its file imports, and ``parameters``, those of
    ``__init__`` if the source shows them.
    """
    module, _, name = class_path.rpartition(".")
    spec = find_module(module, provided)
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
    lacks = sorted(missing_imports(module, tree, provided, set()))
    return {"parameters": parameters(tree, name), "lacks": lacks}


def missing_imports(
    module: str, tree: ast.Module, provided: dict[str, str], visited: set[str]
) -> set[str]:
    """Return the missing top-level packages that a file imports without conditions.

    Files of ``provided`` packages that it imports are inspected as well. Other packages are
    responsible for their own imports.
    """
    missing: set[str] = set()
    for name in imported_modules(module, tree):
        if name in visited:
            continue
        visited.add(name)
        if any(name == package or name.startswith(f"{package}.") for package in provided):
            spec = find_module(name, provided)
            if not isinstance(spec, str) and (spec.origin or "").endswith(".py"):
                with open(str(spec.origin), "rb") as file:
                    missing |= missing_imports(name, ast.parse(file.read()), provided, visited)
        elif isinstance(find_module(name.split(".")[0], {}), str):
            missing.add(name.split(".")[0])
    return missing


def imported_modules(module: str, tree: ast.Module) -> list[str]:
    """Return the modules of the import statements that always run."""
    modules: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            modules += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            modules.append(statement.module)
    return [name for name in modules if name != module]


def top_level_names(body: list[ast.stmt]) -> tuple[set[str], bool]:
    """Return the names that a module binds or may bind, and whether there can be no others."""
    names: set[str] = set()
    for statement in body:
        names |= _bound_names(statement)
    return names, "*" not in names and "__getattr__" not in names and "globals" not in names


def _bound_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
    for handler in getattr(statement, "handlers", []):
        inner += handler.body
    if inner:
        return {name for child in inner for name in _bound_names(child)} | _names_in(
            [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
        )
    # Names that are only read count as well: an existing class must not be reported as missing.
    return _names_in([statement])


def _names_in(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def parameters(tree: ast.Module, name: str) -> dict[str, str] | None:
    """Return the parameters of the class's own ``__init__`` with their annotations as written.

    Returns None if the source does not show them.
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


def versions(packages: list[str], distributions: dict[str, str]) -> dict[str, str | None]:
    """Return the version of each module.

    The version is ``?`` if the module has no distribution, and None if the module is missing.
    ``distributions`` maps module names to distribution names that differ.
    """
    version_by_module: dict[str, str | None] = {}
    for module in packages:
        if isinstance(find_module(module, {}), str):
            version_by_module[module] = None
            continue
        try:
            version_by_module[module] = metadata.version(distributions.get(module, module))
        except metadata.PackageNotFoundError:
            version_by_module[module] = "?"
    return version_by_module


def main() -> None:
    """Read the question from standard input, and print the answer."""
    question = json.load(sys.stdin)
    # As in a rank: the folders that the run adds first, the current folder last, and not the
    # folder of this file.
    *first, current = question.get("folders") or [os.getcwd()]
    sys.path[0:1] = first
    sys.path.append(current)
    provided = question.get("provided", {})
    answer = {
        "python": ".".join(str(n) for n in sys.version_info[:3]),
        "packages": versions(question.get("packages", []), question.get("distributions", {})),
        "classes": {
            place: inspect_class(path, provided)
            for place, path in question.get("class_paths", {}).items()
        },
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
