"""``spec.yaml`` of a run: the specification as a readable file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ltui.training.config.run_spec import RunSpec
from ltui.training.config.yaml_document import check_size
from ltui.training.problem import ProblemError
from ltui.training.shared.regular_files import read_regular

MOST_BYTES = 4 << 20
"""Maximum size of a specification."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _WithoutAnchors(_DUMPER):  # type: ignore[misc]
    """Writes a value that is at several places in full at each of them."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - PyYAML's signature
        return True


def read_spec_file(path: Path) -> RunSpec:
    """Read a file. Raise ``ProblemError`` if it is missing, damaged or from a newer ltui."""
    try:
        text = read_regular(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), error) from error
    return parse_spec(text, str(path))


def parse_spec(text: str, where: str) -> RunSpec:
    """Return the specification that ``spec_text`` wrote. Raise ``ProblemError``."""
    try:
        check_size(text)
        document = yaml.load(text, Loader=_LOADER)  # noqa: S506 - both loaders are safe
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _unreadable(where, error) from error
    if not isinstance(document, dict):
        raise ProblemError.of(where=where, what="this is not a run's specification.")
    return RunSpec.from_document(document, where)


def spec_text(spec: RunSpec) -> str:
    """Return the specification as YAML."""
    return document_text(spec.to_document())


def document_text(document: Any) -> str:
    """Return what ``RunSpec.to_document`` has returned as YAML."""
    return str(yaml.dump(document, Dumper=_WithoutAnchors, sort_keys=False))


def _unreadable(where: str, error: Exception) -> ProblemError:
    reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    return ProblemError.of(
        where=where, what=f"it cannot be read ({reason}).", remedy="Restore it or delete the run."
    )
