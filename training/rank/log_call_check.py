"""Find calls of ``self.log`` in a LightningModule's source that freeze ranks or lose values.

Synchronising a value (``sync_dist=True``) is a collective. If only rank 0 makes the call, it waits
for the other ranks forever. The check reads only the source text, before training begins. It does
not see calls whose arguments or conditions are variables.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

_LOG_METHODS = ("log", "log_dict")
_LIBRARIES = ("lightning", "pytorch_lightning", "torch", "torchmetrics", "builtins", "abc")
"""Packages whose classes are not checked."""
_RANK_ZERO_DECORATORS = ("rank_zero_only", "rank_zero_experiment")


class FreezeWarning(NamedTuple):
    """A possible cause of a freeze or of wrong figures, and what to do about it."""

    what: str
    remedy: str


def find_log_call_warnings(cls: type) -> list[FreezeWarning]:
    """Check the source of ``cls`` and of the user's classes that it inherits from."""
    warnings: list[FreezeWarning] = []
    for part in cls.__mro__:
        if part.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            lines, first_line = inspect.getsourcelines(part)
            tree = ast.parse(textwrap.dedent("".join(lines)))
            file = inspect.getsourcefile(part) or part.__module__
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for call, on_one_rank in _log_calls(tree, on_one_rank=False):
            place = f"{file.rpartition('/')[2]}:{first_line + call.lineno - 1}"
            warnings += _check_call(call, on_one_rank, place)
    return list(dict.fromkeys(warnings))


def _check_call(call: ast.Call, on_one_rank: bool, place: str) -> Iterator[FreezeWarning]:
    synchronised = _has_true_argument(call, "sync_dist")
    if synchronised and on_one_rank:
        yield FreezeWarning(
            f"{place} logs with sync_dist=True in code that only one rank runs: that rank waits "
            "for the others forever.",
            "Log on every rank, or remove sync_dist there.",
        )
    elif synchronised and _has_true_argument(call, "rank_zero_only"):
        yield FreezeWarning(
            f"{place} logs with both sync_dist=True and rank_zero_only=True: only rank 0 would "
            "take part in the synchronisation.",
            "Keep sync_dist=True and remove rank_zero_only=True: Lightning writes the value only "
            "once anyway.",
        )


def _has_true_argument(call: ast.Call, name: str) -> bool:
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is True
        for k in call.keywords
    )


def _log_calls(node: ast.AST, *, on_one_rank: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield every ``self.log(...)`` within ``node``, and True if only one rank reaches it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        if node.func.attr in _LOG_METHODS and isinstance(owner, ast.Name) and owner.id == "self":
            yield node, on_one_rank
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        decorated = any(_has_name(d, _RANK_ZERO_DECORATORS) for d in node.decorator_list)
        on_one_rank = on_one_rank or decorated
    if isinstance(node, ast.If):
        yield from _log_calls(node.test, on_one_rank=on_one_rank)
        selects_one_rank = _selects_one_rank(node.test)
        for statement in node.body:
            yield from _log_calls(statement, on_one_rank=on_one_rank or selects_one_rank)
        for statement in node.orelse:
            yield from _log_calls(statement, on_one_rank=on_one_rank)
        return
    for child in ast.iter_child_nodes(node):
        yield from _log_calls(child, on_one_rank=on_one_rank)


def _selects_one_rank(test: ast.expr) -> bool:
    """Return True for ``self.trainer.is_global_zero``, ``self.global_rank == 0`` and the like.

    Their negations select the other ranks, so they return False.
    """
    if isinstance(test, ast.Compare):
        equal = len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)
        return equal and _has_name(test.left, ("global_rank", "local_rank", "rank"))
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_selects_one_rank(value) for value in test.values)
    return _has_name(test, ("is_global_zero",))


def _has_name(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Return True if a name, an attribute or a called function has one of ``names``."""
    target: Any = node.func if isinstance(node, ast.Call) else node
    name = getattr(target, "attr", None) or getattr(target, "id", None)
    return name in names
