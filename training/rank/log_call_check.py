"""Reads a LightningModule's source for calls of ``self.log`` that freeze ranks or tell half of it.

A value that is synchronised (``sync_dist=True``) is a collective: where only rank 0 comes by, it
waits for the others for ever. Told before training begins, from the text alone; what is decided by
variables is not seen.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

_LOGGING = ("log", "log_dict")
_OURS = ("lightning", "pytorch_lightning", "torch", "torchmetrics", "builtins", "abc")
_ONE_RANK = ("rank_zero_only", "rank_zero_experiment")


class FreezeWarning(NamedTuple):
    """Something that freezes runs or makes their figures wrong, and what to do about it."""

    what: str
    remedy: str


def find_log_call_warnings(cls: type) -> list[FreezeWarning]:
    """From the source of ``cls`` and of the classes of the user's that it inherits from."""
    found: list[FreezeWarning] = []
    for part in cls.__mro__:
        if part.__module__.partition(".")[0] in _OURS:
            continue
        try:
            lines, first = inspect.getsourcelines(part)
            tree = ast.parse(textwrap.dedent("".join(lines)))
            file = inspect.getsourcefile(part) or part.__module__
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for call, alone in _log_calls(tree, alone=False):
            place = f"{file.rpartition('/')[2]}:{first + call.lineno - 1}"
            found += _judge(call, alone, place)
    return list(dict.fromkeys(found))


def _judge(call: ast.Call, alone: bool, place: str) -> Iterator[FreezeWarning]:
    synchronised = _true(call, "sync_dist")
    if synchronised and alone:
        yield FreezeWarning(
            f"{place} logs with sync_dist=True where only one rank comes by: that rank waits for "
            "the others for ever.",
            "Log on every rank, or drop sync_dist there.",
        )
    elif synchronised and _true(call, "rank_zero_only"):
        yield FreezeWarning(
            f"{place} logs with both sync_dist=True and rank_zero_only=True: only rank 0 would "
            "take part in the synchronisation.",
            "Keep sync_dist=True and drop rank_zero_only=True: Lightning writes it once anyway.",
        )


def _true(call: ast.Call, name: str) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


def _log_calls(node: ast.AST, *, alone: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Every ``self.log(...)`` within ``node``, and whether only one rank gets to it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if node.func.attr in _LOGGING and isinstance(owner, ast.Name) and owner.id == "self":
            yield node, alone
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        alone = alone or any(_named(d, _ONE_RANK) for d in node.decorator_list)
    if isinstance(node, ast.If):
        yield from _log_calls(node.test, alone=alone)
        one = _asks_for_one_rank(node.test)
        for statement in node.body:
            yield from _log_calls(statement, alone=alone or one)
        for statement in node.orelse:
            yield from _log_calls(statement, alone=alone)
        return
    for child in ast.iter_child_nodes(node):
        yield from _log_calls(child, alone=alone)


def _asks_for_one_rank(test: ast.expr) -> bool:
    """``self.trainer.is_global_zero`` and ``self.global_rank == 0``, not their opposites."""
    if isinstance(test, ast.Compare):
        equal = len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        return equal and _named(test.left, ("global_rank", "local_rank", "rank"))
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_asks_for_one_rank(value) for value in test.values)
    return _named(test, ("is_global_zero",))


def _named(node: ast.AST, names: tuple[str, ...]) -> bool:
    target: Any = node.func if isinstance(node, ast.Call) else node
    name = getattr(target, "attr", None) or getattr(target, "id", None)
    return name in names
